"""Two logical CPU devices, one strategy over them, one seed per test."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from tf_optimizers._compat.hooks import build_from_specs

DEVICES = ["CPU:0", "CPU:1"]

# GPUs multiply float32 matrices by 10 bits of each factor unless told not to.
# This is for the processes that tests start, too.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
tf.config.experimental.enable_tensor_float_32_execution(False)

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration() for _ in DEVICES],
)


def _end_at_once(dataset):
    """Return a dataset whose iterators are not tuned.

    The thread that tunes one sleeps as long as that has lived, up to a minute,
    and misses every third end: whoever deletes the iterator waits.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


# All iterators call it, also those of devices, which nothing public reaches.
dataset_ops.DatasetV2._apply_debug_options = _end_at_once


def is_short(config):
    """Tell whether neither `-m long` nor `tox -e next` has asked for all."""
    return (
        "long" not in config.getoption("-m")
        and "TENSORFLOW_DEFAULTS" not in os.environ
    )


def is_mirrored(strategy):
    return isinstance(strategy, tf.distribute.MirroredStrategy)


def pytest_sessionstart(session):
    """Compile kernels and graphs in fewer passes: a sixth of the time."""
    if not is_short(session.config):
        return
    # Keras draws a batch before each `fit`, and drops the iterator. TensorFlow
    # (2.21) may crash if one of several devices still waits for the next batch:
    # who answers refers to the iterator, which may be gone.
    build_from_specs(is_mirrored)
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )
    # Another version may not know these, and end the process.
    if tf.__version__.startswith("2.21."):
        os.environ.setdefault(
            "XLA_FLAGS",
            "--xla_backend_optimization_level=1 "
            "--xla_cpu_parallel_codegen_split_count=1 "
            "--xla_cpu_use_fusion_emitters=false",
        )


_list_physical_devices = tf.config.list_physical_devices


def _with_gpu(device_type=None):
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    found = _list_physical_devices(device_type)
    return found + [gpu] * (device_type in (None, "GPU"))


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Let Keras see a GPU, so that it compiles steps by XLA unless told not to.

    What is computed stays on the CPU.
    """
    monkeypatch.setattr(tf.config, "list_physical_devices", _with_gpu)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Pretend a GPU for all tests, if asked to.

    Another CPU than the host is the default device then, as a GPU would be.
    """
    if "PRETENDED_GPU" not in os.environ:
        return (yield)
    tf.config.list_physical_devices = _with_gpu
    with tf.device("CPU:1"):
        return (yield)


@pytest.fixture
def where_xla_runs(case):
    """Be on a device that XLA may compile an optimizer's steps for."""
    with case.where_xla_runs():
        yield


@pytest.fixture(autouse=True)
def seed():
    keras.utils.set_random_seed(0)


@pytest.fixture
def on_cpu():
    """Train on the CPU, so that two trainings of one model are equal.

    On a GPU, TensorFlow tries which kernel multiplies matrices fastest, and may
    find another one for each graph.
    """
    with tf.device(DEVICES[0]):
        yield


@pytest.fixture(scope="session")
def mirrored(request):
    """One for all tests: TensorFlow's collectives of two get mixed up.

    To trace these, TensorFlow's default, takes a third of the time of such
    tests, so most exchange on one device.
    """
    exchange = (
        tf.distribute.ReductionToOneDevice()
        if is_short(request.config)
        else None
    )
    return tf.distribute.MirroredStrategy(DEVICES, cross_device_ops=exchange)
