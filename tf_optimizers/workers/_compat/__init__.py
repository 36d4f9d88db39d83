"""Wraps private names of TensorFlow and Keras for `tf_optimizers.workers`."""
