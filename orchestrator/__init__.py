"""One big Mixture-of-Experts GGUF over several machines, with a proof that the answer is the same."""
