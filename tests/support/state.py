"""Models with state that each replica computes from its own rows."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

RNG = np.random.default_rng(0)
X = (RNG.standard_normal((12, 4)) + 2).astype("float32")
Y = RNG.standard_normal((12, 2)).astype("float32")


class Center(keras.layers.Layer):
    """Tracks the mean of its inputs, as in DINO, and subtracts it.

    Args:
        kind: The kind of variable: "keras", or "tensorflow", which Keras does
            not track.
        **kwargs: Arguments of `add_weight`.
    """

    def __init__(self, kind="keras", **kwargs):
        super().__init__()
        self.kind, self.kwargs = kind, kwargs

    def build(self, shape):
        if self.kind == "tensorflow":
            self.parts = {"center": tf.Variable(tf.zeros(shape[1:]))}
            self.center = self.parts["center"]
        else:
            self.center = self.add_weight(
                shape=shape[1:],
                initializer="zeros",
                trainable=False,
                **self.kwargs,
            )

    def call(self, inputs, training=False):
        if training:
            mean = ops.mean(inputs, axis=0)
            self.center.assign(0.75 * self.center + 0.25 * mean)
        return inputs - ops.convert_to_tensor(self.center)


class Counter(keras.layers.Layer):
    """Counts inputs above 2; each replica has a different number of them."""

    def build(self, shape):
        self.count = self.add_weight(
            shape=(),
            initializer="zeros",
            dtype="int32",
            trainable=False,
            name="count",
        )

    def call(self, inputs, training=False):
        if training:
            above = ops.sum(ops.cast(inputs > 2, "int32"))
            self.count.assign(self.count + above)
        return inputs


class Weight(keras.layers.Dense):
    """Assigns a value that depends on rows to a trainable weight."""

    def call(self, inputs, training=False):
        if training:
            self.bias.assign(self.bias + 1e-3 * ops.mean(inputs))
        return super().call(inputs)


def compiled(*layers, **kwargs):
    """Return a model that trains at rate 0, so that only its state changes."""
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.SGD(0.0), "mse", **kwargs)
    return model


def center(*arguments, **kwargs):
    keras.utils.set_random_seed(1)
    return compiled(Center(*arguments, **kwargs), keras.layers.Dense(2))


def fit(model, epochs=2, **kwargs):
    """Train on batches in order, with the same number of rows per replica."""
    return model.fit(
        *(X, Y), batch_size=4, epochs=epochs, shuffle=False, verbose=0, **kwargs
    )


def center_of(model):
    return np.array(model.layers[0].center)


def moved_towards(center, values):
    """Move a variable towards the mean of some rows; return its value."""
    center.assign(0.75 * center + 0.25 * ops.mean(values, axis=0))
    return 1.0 * center


def pull(center, move=moved_towards):
    """Return a loss function that pulls to a moving mean of the targets."""

    def loss(y_true, y_pred):
        return ops.mean((y_pred - move(center, y_true)) ** 2, axis=-1)

    return loss
