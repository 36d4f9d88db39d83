"""Implements the strategy that trains Keras models on several workers."""
