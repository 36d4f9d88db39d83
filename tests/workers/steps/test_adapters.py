"""LoRA enabled after the first step raises until the next `compile`."""

import keras
import numpy as np
import pytest

import tf_optimizers as tfo

X = np.random.default_rng(0).random((8, 4)).astype("float32")
MAKERS = {
    "keras AdamW": lambda: keras.optimizers.AdamW(0.01),
    "Lamb": lambda: tfo.Lamb(0.01),
    "SparseLoCo": lambda: tfo.SparseLoCo(keras.optimizers.AdamW(0.01)),
}


def fit(model):
    model.fit(X, X, batch_size=8, verbose=0)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_lora_after_fit_needs_another_compile(make, ours):
    with ours.scope():
        layer = keras.layers.Dense(4)
        model = keras.Sequential([keras.Input((4,)), layer])
        model.compile(make(), "mse")
    fit(model)
    with ours.scope():
        layer.enable_lora(2)
    before = [weight.numpy() for weight in model.weights]
    with pytest.raises(RuntimeError, match=r"Received: LoRA .*dense.*compile"):
        fit(model)
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)
    with ours.scope():
        model.compile(make(), "mse")
    kernel, adapter = layer._kernel.numpy(), layer.lora_kernel_b.numpy()
    fit(model)
    np.testing.assert_array_equal(layer._kernel.numpy(), kernel)
    assert np.any(layer.lora_kernel_b.numpy() != adapter)


def test_weights_may_be_frozen_and_thawed_after_fit(ours):
    """Keras keeps training what it trained when the model was compiled."""
    with ours.scope():
        first, last = keras.layers.Dense(4), keras.layers.Dense(4)
        model = keras.Sequential([keras.Input((4,)), first, last])
        first.enable_lora(2)
        last.trainable = False
        model.compile(keras.optimizers.AdamW(0.01), "mse")
    fit(model)
    first.trainable, last.trainable = False, True
    fit(model)
