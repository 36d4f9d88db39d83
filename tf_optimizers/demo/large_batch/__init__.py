"""Compares optimizers in a few large steps."""
