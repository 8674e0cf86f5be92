"""Moves bytes between two processes and knows no message."""
