"""The process on another machine: serves expert computations to backbones and holds no state between them."""
