"""Checks that workers agree between steps, and finds deadlocks in steps."""
