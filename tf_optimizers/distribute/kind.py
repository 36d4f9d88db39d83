"""Which kind of strategy one is."""

import tensorflow as tf


def is_sparse_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Return whether it is a `SparseMultiWorkerMirroredStrategy`."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    # Imported here: only that strategy needs private parts of `tf.distribute`.
    from tf_optimizers.distribute.strategy import (
        SparseMultiWorkerMirroredStrategy,
    )

    return isinstance(strategy, SparseMultiWorkerMirroredStrategy)
