"""Trains Keras models on several workers, with the results of one process."""
