"""From a request to its tokens: queue, decode loop, sampling, text."""
