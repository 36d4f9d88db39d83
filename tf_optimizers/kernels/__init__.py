"""Compiles pure functions of tensors, once per shape."""
