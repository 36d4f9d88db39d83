"""The version of Keras, for tests that depend on it."""

import keras

KERAS = tuple(map(int, keras.__version__.split(".")[:2]))
