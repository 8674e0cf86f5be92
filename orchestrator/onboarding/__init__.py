"""Drives the gate for a model: local workers, prompts, comparison, report."""
