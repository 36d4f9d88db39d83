"""Two logical CPU devices, one strategy over them, one seed per test."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf
from quick_graphs import (
    compile_in_fewer_passes,
    leave_data_untuned,
    leave_graphs_as_traced,
)
from real_workers import AS_TRACED
from tensorflow.python.eager import context

import tf_optimizers as tfo
from tf_optimizers._compat.hooks import build_from_specs

DEVICES = ["CPU:0", "CPU:1"]

# By default, GPUs multiply float32 matrices with 10 bits per factor. This also
# applies to processes that tests start.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
tf.config.experimental.enable_tensor_float_32_execution(False)

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration() for _ in DEVICES],
)

leave_data_untuned()


def is_short(config):
    """Return whether neither `-m long` nor `tox -e next` asks for all tests."""
    return (
        "long" not in config.getoption("-m")
        and "TENSORFLOW_DEFAULTS" not in os.environ
    )


def is_mirrored(strategy):
    return isinstance(strategy, tf.distribute.MirroredStrategy)


def pytest_sessionstart(session):
    """Save a sixth of the time: compile kernels and graphs in fewer passes."""
    if not is_short(session.config):
        return
    # Keras draws a batch before each `fit`, and drops the iterator. TensorFlow
    # (2.21) may crash if one of several devices still waits for the next batch,
    # since the answer refers to the iterator, which may be deleted.
    build_from_specs(is_mirrored)
    leave_graphs_as_traced()
    os.environ[AS_TRACED] = "1"  # Workers that tests start read this.
    compile_in_fewer_passes()


def on_cpus():
    """Return our strategy, with a replica on each CPU, even if there is a GPU.

    By default, TensorFlow's strategies for several workers use the GPUs.
    """
    resolvers = tf.distribute.cluster_resolver
    no_cluster = resolvers.SimpleClusterResolver(tf.train.ClusterSpec({}))
    return tfo.SparseMultiWorkerMirroredStrategy(no_cluster)


_list_physical_devices = tf.config.list_physical_devices


def _with_gpu(device_type=None):
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    found = _list_physical_devices(device_type)
    return found + [gpu] * (device_type in (None, "GPU"))


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Let Keras see a GPU, so that Keras compiles steps with XLA by default.

    All computations stay on the CPU.
    """
    monkeypatch.setattr(tf.config, "list_physical_devices", _with_gpu)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Pretend that there is a GPU in all tests, if `PRETENDED_GPU` is set.

    The default device is then a second CPU, since a GPU is not the host either.
    """
    if "PRETENDED_GPU" not in os.environ:
        return (yield)
    tf.config.list_physical_devices = _with_gpu
    context.num_gpus = lambda: 1  # A strategy's replicas would be on the GPU.
    with tf.device("CPU:1"):
        return (yield)


@pytest.fixture
def where_xla_runs(case):
    """Run on a device for which XLA may compile an optimizer's steps."""
    with case.where_xla_runs():
        yield


@pytest.fixture(autouse=True)
def seed():
    keras.utils.set_random_seed(0)


@pytest.fixture
def on_cpu():
    """Train on the CPU, so that two trainings of one model are equal.

    On a GPU, TensorFlow looks for the fastest kernel for matrix products, and
    may choose a different one for each graph.
    """
    with tf.device(DEVICES[0]):
        yield


@pytest.fixture(scope="session")
def mirrored(request):
    """Return one strategy for all tests, since two would mix up collectives.

    Tracing TensorFlow's default collectives takes a third of the time of such
    tests, so most reduce on one device.
    """
    exchange = (
        tf.distribute.ReductionToOneDevice()
        if is_short(request.config)
        else None
    )
    return tf.distribute.MirroredStrategy(DEVICES, cross_device_ops=exchange)
