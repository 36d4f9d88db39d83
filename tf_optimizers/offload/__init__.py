"""Keeps the state of `AdamOffload` on the host, and runs its steps there."""
