"""Treats gradients before an optimizer's own mathematics."""
