"""The version of Keras, for what it alone decides."""

import keras

KERAS = tuple(map(int, keras.__version__.split(".")[:2]))
