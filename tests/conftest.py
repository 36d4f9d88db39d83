"""Two logical CPU devices, one strategy over them, one seed per test."""

import collections
import gc
import os
import re

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf

DEVICES = ["CPU:0", "CPU:1"]

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration() for _ in DEVICES],
)


def pytest_collection_modifyitems(config, items):
    """Begin with the files that take longest; say what is left out."""
    slow = {i.path for i in items if i.get_closest_marker("slow")}
    counts = collections.Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -counts[item.path]))
    if re.search(r"\blong\b", config.getoption("-m")):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="only with `-m long`"))


def pytest_collection_finish():
    """Leave what was imported out of garbage collections.

    They are faster then, and more frequent, too: now and then a tf.data
    iterator takes as long to end as it has lived.
    """
    gc.freeze()
    gc.collect()


@pytest.fixture(autouse=True)
def seed():
    keras.utils.set_random_seed(0)


@pytest.fixture(scope="session")
def mirrored():
    """One for all tests: TensorFlow's collectives of two get mixed up."""
    return tf.distribute.MirroredStrategy(DEVICES)
