"""What AdamOffload keeps and computes on the host."""
