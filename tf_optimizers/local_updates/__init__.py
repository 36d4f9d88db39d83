"""Runs the local steps of `SparseLoCo`, and synchronizes the weights."""
