"""The star: rows of one MoE call out to the workers, their results back."""
