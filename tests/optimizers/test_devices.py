"""Weights may be on a device other than the default one."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_equal

import tf_optimizers as tfo


def in_a_group():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("`MultiOptimizer` needs Keras 3.15")
    groups = keras.optimizers.OptimizerMap(
        tfo.Lamb(0.05), {".*bias": tfo.LANS(0.05)}
    )
    return keras.optimizers.MultiOptimizer(groups)


MAKE = {
    "lamb": lambda: tfo.Lamb(0.05, clipnorm=0.1),
    "lans": lambda: tfo.LANS(0.05),
    "offload": lambda: tfo.AdamOffload(0.05, weight_decay=0.1),
    "dgc": lambda: tfo.DGCMomentum(
        0.05, sparsity=(0.5,), min_compress_size=10, clipnorm=0.1
    ),
    "dense dgc": lambda: tfo.DGCMomentum(0.05, rampup_begin_step=100),
    "loco": lambda: tfo.SparseLoCo(
        keras.optimizers.AdamW(0.05), sparsity=(0.5,), min_compress_size=10
    ),
    "loco of 2 steps": lambda: tfo.SparseLoCo(
        keras.optimizers.AdamW(0.05),
        sync_every=2,
        sparsity=(0.5,),
        min_compress_size=10,
    ),
    "sharded": lambda: tfo.ShardedState(keras.optimizers.Adam(0.05)),
    "averaged": lambda: tfo.Lamb(
        0.05, use_ema=True, gradient_accumulation_steps=2
    ),
    # Keras builds these optimizers while it traces the first step.
    "scaled lamb": lambda: keras.optimizers.LossScaleOptimizer(tfo.Lamb(0.05)),
    "scaled dgc": lambda: keras.optimizers.LossScaleOptimizer(
        tfo.DGCMomentum(0.05, sparsity=(0.5,), min_compress_size=10)
    ),
    "group": in_a_group,
}
ROWS = np.random.default_rng(0).integers(0, 9, (16, 4))
TARGETS = np.random.default_rng(1).random((16, 3), "float32")


def train(name, embedding, dense):
    """Return weights before and after a training with layers on devices."""
    keras.utils.set_random_seed(1)
    with tf.device(embedding):
        first = keras.layers.Embedding(9, 5)
        first.build()
    with tf.device(dense):
        last = keras.layers.Dense(3)
        last.build((None, 20))
    layers = [first, keras.layers.Flatten(), last]
    model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
    before = model.get_weights()
    # XLA, Keras's default on a GPU, compiles for one device.
    model.compile(MAKE[name](), "mse", jit_compile=False)
    model.fit(ROWS, TARGETS, batch_size=8, epochs=3, verbose=0, shuffle=False)
    return before, model.get_weights()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:(DGC|Sparse|Shard):UserWarning")
@pytest.mark.parametrize("name", MAKE)
def test_weights_on_another_device_train_the_same(name):
    before, expected = train(name, "CPU:0", "CPU:0")
    for a, b in zip(before, expected, strict=True):
        assert np.abs(a - b).max() > 1e-3
    for devices in [("CPU:1", "CPU:1"), ("CPU:1", "CPU:0")]:
        _, found = train(name, *devices)
        assert_equal(found, expected)
