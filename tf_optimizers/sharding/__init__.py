"""Distributes the state of an optimizer among replicas."""
