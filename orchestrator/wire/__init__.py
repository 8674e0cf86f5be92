"""The protocol without I/O: bytes to messages and back, and the order in which they may come."""
