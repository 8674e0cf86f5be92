"""The ring: steps and ordered KV operations that travel through stages of layers."""
