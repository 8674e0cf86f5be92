"""One llama.cpp context each; the only importer of `bindings`."""
