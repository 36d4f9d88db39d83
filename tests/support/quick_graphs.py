"""Graphs and kernels that take less time to make, for short tests."""

import os

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops


def leave_graphs_as_traced():
    """Keep TensorFlow from optimizing graphs, which saves a fifth of time."""
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )


def compile_in_fewer_passes():
    """Let XLA compile in fewer passes, unless the user has set XLA's flags."""
    # Other versions end the process if they do not know these flags.
    if tf.__version__.startswith("2.21."):
        os.environ.setdefault(
            "XLA_FLAGS",
            "--xla_backend_optimization_level=1 "
            "--xla_cpu_parallel_codegen_split_count=1 "
            "--xla_cpu_use_fusion_emitters=false",
        )


def leave_data_untuned():
    """Let iterators of datasets end at once.

    The thread that tunes an iterator sleeps for as long as the iterator has
    existed, up to a minute. It misses every third deletion, which then blocks.
    """
    # All iterators call this function, even iterators of devices, which have
    # no public name.
    dataset_ops.DatasetV2._apply_debug_options = _untuned


def _untuned(dataset):
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
