"""Kernels outlive optimizers, not their context, and no tape sees them."""

import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_optimizers as tfo

RESET = """
import keras
import tensorflow as tf
from tensorflow.python.eager import context

import tf_optimizers as tfo

OPTIMIZERS = {
    tfo.Lamb: {},
    tfo.LANS: {},
    tfo.AdamOffload: {},
    tfo.DGCMomentum: {"min_compress_size": 1},
}
[cpu] = tf.config.list_physical_devices("CPU")
for _ in range(2):
    context._reset_context()
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for make, own in OPTIMIZERS.items():
        with strategy.scope():
            weight = keras.Variable([1.0, 2.0])
            optimizer = make(0.1, clipnorm=1.0, **own)
        strategy.run(optimizer.apply, ([tf.ones(2)], [weight]))
        print(*weight.numpy())
"""


@pytest.mark.long
def test_steps_go_on_after_tensorflow_is_reset():
    """As Keras's own tests of strategies do before each."""
    done = subprocess.run(
        [sys.executable, "-c", RESET],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[:4], done.stdout.splitlines()[4:]
    assert first == second
    assert len(set(first)) == 4


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: tfo.Lamb(clipnorm=1.0),
        lambda: tfo.AdamOffload(global_clipnorm=1.0),
        lambda: tfo.DGCMomentum(0.1, clipnorm=1.0),
    ],
    ids=["lamb", "offload", "dgc"],
)
@pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic")
def test_tape_that_still_records_has_the_gradients_of_the_loss(make, graph):
    """Kernels of 4,096 elements and more loop, and XLA knows no gradient."""
    variable, optimizer = keras.Variable(tf.ones([64, 64])), make()
    optimizer.build([variable])

    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(variable.value**2)
            gradient = tape.gradient(loss, variable.value)
            optimizer.apply([gradient], [variable])
        return tape.gradient(loss, variable.value)

    gradient = tf.function(step)() if graph else step()
    np.testing.assert_array_equal(gradient, np.full([64, 64], 2.0))
    assert (variable.numpy() < 1).all()
