"""Compares optimizers over a few steps with large batches."""
