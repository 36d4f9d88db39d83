"""Compares training with Adam's state on the device and on the host."""
