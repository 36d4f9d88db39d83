"""Wraps private names of TensorFlow and Keras that only `workers` needs."""
