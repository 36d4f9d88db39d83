"""No layer of Keras gets a batch without rows.

Some layers would fail, or crash the process.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.long

L = keras.layers
RNG = np.random.default_rng(0)


def image(rank):
    return (8,) * rank + (4,)


CELL = {"filters": 2, "kernel_size": 3}
# The shape of a row, and layers that accept it.
LAYERS = {
    **{
        f"{kind}{rank}D": (image(rank), lambda k=kind, r=rank: layer(k, r))
        for rank in (1, 2, 3)
        for kind in ("Conv", "MaxPooling", "AveragePooling", "GlobalMaxPooling")
    },
    "Conv2DTranspose": (image(2), lambda: L.Conv2DTranspose(2, 3)),
    "DepthwiseConv2D": (image(2), lambda: L.DepthwiseConv2D(3)),
    "SeparableConv2D": (image(2), lambda: L.SeparableConv2D(2, 3)),
    "ConvLSTM1D": ((3, 8, 2), lambda: L.ConvLSTM1D(**CELL)),
    "LSTM": ((5, 4), lambda: L.LSTM(3)),
    "GRU": ((5, 4), lambda: L.GRU(3)),
    "Bidirectional": ((5, 4), lambda: L.Bidirectional(L.LSTM(3))),
    "BatchNormalization": (image(2), lambda: L.BatchNormalization()),
    "LayerNormalization": (image(2), lambda: L.LayerNormalization()),
    "GroupNormalization": (image(2), lambda: L.GroupNormalization(2)),
    "UpSampling2D": (image(2), lambda: L.UpSampling2D()),
    "EinsumDense": ((5, 4), lambda: L.EinsumDense("abc,cd->abd", (5, 3))),
    "TimeDistributed": ((5, 4), lambda: L.TimeDistributed(L.Dense(2))),
    "Flatten": ((5, 4), lambda: L.Flatten()),
}


def layer(kind, rank):
    arguments = {"Conv": (2, 3), "GlobalMaxPooling": ()}.get(kind, (2,))
    return getattr(L, f"{kind}{rank}D")(*arguments)


class Attention(L.Layer):
    """Applies attention to its own inputs."""

    def __init__(self):
        super().__init__()
        self.attention = L.MultiHeadAttention(2, 2)

    def call(self, inputs):
        return self.attention(inputs, inputs)


class Residual(L.Layer):
    """Adds the output of a layer to its inputs."""

    def __init__(self):
        super().__init__()
        self.dense, self.add = L.Dense(4), L.Add()

    def call(self, inputs):
        return self.add([inputs, self.dense(inputs)])


LAYERS |= {"attention": ((5, 4), Attention), "Add": ((5, 4), Residual)}


SHAPES = {shape for shape, _ in LAYERS.values()}


def model_of(shape):
    """Return a model of all layers for a shape, each after a dense layer."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input(shape)
    outputs = [
        L.Flatten()(make()(L.Dense(shape[-1])(inputs)))
        for own, make in LAYERS.values()
        if own == shape
    ]
    model = keras.Model(inputs, L.Dense(1)(L.Concatenate()(outputs)))
    model.compile(keras.optimizers.SGD(0.001), "mse")
    return model


@pytest.mark.parametrize("shape", sorted(SHAPES), ids=str)
def test_layers_take_a_batch_smaller_than_the_replicas(ours, shape):
    """This includes training, and prediction, where the row count is known."""
    x = RNG.standard_normal((1, *shape)).astype("float32")
    y = np.ones((1, 1), "float32")
    with ours.scope():
        model = model_of(shape)
    (loss,) = model.fit(x, y, verbose=0).history["loss"]
    (expected,) = model_of(shape).fit(x, y, verbose=0).history["loss"]
    assert loss == pytest.approx(expected, 1e-4)
    known = tf.data.Dataset.from_tensors(x)
    assert model.predict(known, verbose=0).shape == (1, 1)
