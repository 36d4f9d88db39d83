"""Which strategy there is."""

import tensorflow as tf


def is_sparse_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Tell whether it is a `SparseMultiWorkerMirroredStrategy`."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    # It needs private modules of `tf.distribute`, and nobody else does.
    from tf_optimizers.distribute.strategy import (
        SparseMultiWorkerMirroredStrategy,
    )

    return isinstance(strategy, SparseMultiWorkerMirroredStrategy)
