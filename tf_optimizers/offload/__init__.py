"""Stores the state of `AdamOffload` on the host, and runs steps there."""
