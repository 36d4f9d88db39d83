"""Two logical CPU devices, one strategy over them, one seed per test."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops

DEVICES = ["CPU:0", "CPU:1"]

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration() for _ in DEVICES],
)


def _end_at_once(make):
    """Return a function that makes a device's dataset without autotuning.

    The thread that tunes its iterator sleeps as long as that has lived, up to a
    minute, and misses every third end: whoever deletes the iterator waits.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return lambda *args: make(*args).with_options(options)


# Nothing public reaches these datasets, of which each device has one.
multi_device_iterator_ops._create_device_dataset = _end_at_once(
    multi_device_iterator_ops._create_device_dataset
)


@pytest.fixture(autouse=True)
def seed():
    keras.utils.set_random_seed(0)


@pytest.fixture(scope="session")
def mirrored():
    """One for all tests: TensorFlow's collectives of two get mixed up."""
    return tf.distribute.MirroredStrategy(DEVICES)
