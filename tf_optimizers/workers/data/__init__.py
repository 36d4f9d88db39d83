"""Splits data among replicas, and compares rows and order between workers."""
