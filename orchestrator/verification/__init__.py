"""Compares logits with the oracle's and judges them; pure functions."""
