"""Shares the state of an optimizer out among replicas."""
