"""Pure functions of tensors, compiled once per shape."""
