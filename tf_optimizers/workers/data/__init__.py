"""Splits data among replicas, and compares shared data between workers."""
