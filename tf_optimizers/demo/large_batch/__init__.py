"""Compares optimizers over a few large steps."""
