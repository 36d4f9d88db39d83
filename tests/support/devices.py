"""Two logical CPU devices, one strategy over them, one seed per test."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf

DEVICES = ["CPU:0", "CPU:1"]

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration() for _ in DEVICES],
)


@pytest.fixture(autouse=True)
def seed():
    keras.utils.set_random_seed(0)


@pytest.fixture(scope="session")
def mirrored():
    """One for all tests: TensorFlow's collectives of two get mixed up."""
    return tf.distribute.MirroredStrategy(DEVICES)
