"""Trains Keras models on several workers as one process would."""
