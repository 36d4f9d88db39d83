"""Kernels outlive optimizers, but not the context that they belong to."""

import pathlib
import subprocess
import sys

import pytest

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
