"""Keeps and computes on the host what AdamOffload keeps and computes."""
