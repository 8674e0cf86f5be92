"""Who computes what: facts of a model and of machines in, a layout with its reasons out."""
