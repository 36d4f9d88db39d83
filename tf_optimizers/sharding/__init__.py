"""Distributes an optimizer's state among replicas."""
