"""Tells our strategy from others."""

import tensorflow as tf


def is_sparse_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Return whether it is a `SparseMultiWorkerMirroredStrategy`."""
    return getattr(strategy.extended, "is_sparse_multi_worker", False)
