"""Private names of TensorFlow and Keras that only the strategy depends on."""
