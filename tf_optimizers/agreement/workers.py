"""Tells our strategy from others, and replicas from one another."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_optimizers.agreement.statements import gather_statements


def is_sparse_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Return whether it is a `SparseMultiWorkerMirroredStrategy`."""
    return getattr(strategy.extended, "is_sparse_multi_worker", False)


def rank_among(count: int) -> int:
    """Return the calling replica's rank among `count`.

    Args:
        count: How many replicas there are of its process, or of all.
    """
    context = tf.distribute.get_replica_context()
    # All workers have equally many replicas, numbered worker by worker.
    return tf.get_static_value(context.replica_id_in_sync_group) % count


class Workers:
    """The worker processes of a strategy.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`, or any of one process.

    Attributes:
        index: This process's index, from 0.
        count: How many processes there are.
        replicas: How many replicas all of them have.
        local_replicas: How many replicas each of them has.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.index, self.count = 0, 1
        if is_sparse_multi_worker(strategy):
            self.index = strategy.extended.worker_index
            self.count = strategy.extended.workers
        elif isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise TypeError(
                "The strategy must be a "
                "`tfo.SparseMultiWorkerMirroredStrategy`, or one of a single "
                f"process. Received: {type(strategy).__name__}, under which "
                "Keras 3 does not `fit`."
            )
        self.replicas = strategy.num_replicas_in_sync
        self.local_replicas = self.replicas // self.count
        self._strategy = strategy

    @property
    def is_first(self) -> bool:
        """Whether this process warns and writes for all."""
        return self.index == 0

    def gather(self, statement: Any) -> list[Any]:
        """Return the statements of all workers, which JSON can hold.

        Every worker must call this equally often, in the same order.
        """
        if self.count == 1:
            return [statement]
        return gather_statements(
            self._strategy,
            "a backup",
            statement,
            "Pass `BackupAndRestore` to `fit` on every worker.",
        )


def digests(values: Iterable[np.ndarray]) -> list[str]:
    """Return the digests of the distinct values."""
    return sorted(
        {
            hashlib.blake2b(as_bytes(value).data, digest_size=16).hexdigest()
            for value in values
        }
    )


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array of any dtype, bfloat16 included."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
