"""Runs the steps of Keras models, and weights replicas by their rows."""
