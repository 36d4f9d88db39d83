"""What worker processes tell each other between steps."""

from typing import Any

import tensorflow as tf

from tf_optimizers.distribute.agreement import gather_statements
from tf_optimizers.distribute.kind import is_sparse_multi_worker


class Workers:
    """The worker processes of a strategy.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`, or any of one process.

    Attributes:
        index: This process's, from 0.
        count: How many processes there are.
        replicas: Those of all of them.
        local_replicas: Those of each of them.
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
        """Whether this process speaks and writes for all."""
        return self.index == 0

    def gather(self, statement: Any) -> list[Any]:
        """Return what all workers say, which JSON can hold, by worker.

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
