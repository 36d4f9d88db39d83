"""Keeps the state of AdamOffload on the host, and steps there."""
