"""GGUF files: read, sliced, upcycled, hashed, fetched and known by name."""
