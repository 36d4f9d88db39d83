"""Prepares gradients for an optimizer's own mathematics."""
