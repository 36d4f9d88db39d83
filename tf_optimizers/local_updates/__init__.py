"""Runs the inner optimizer of SparseLoCo."""
