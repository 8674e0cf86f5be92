"""The native half: builds the patched engine and speaks with it through ctypes."""
