"""What worker processes tell each other between steps."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import Coordination
from tf_optimizers.distribute.strategy import SparseMultiWorkerMirroredStrategy

# What has been written is there; this is for the way.
_READING_SECONDS = 60.0

_serial = itertools.count()


class Workers:
    """The worker processes of a strategy.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`, or any of one process.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.index, self.count = 0, 1
        if isinstance(strategy, SparseMultiWorkerMirroredStrategy):
            self.index = strategy.extended.worker_index
            self.count = strategy.extended.workers
        elif isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise TypeError(
                "The strategy must be a "
                "`tfo.SparseMultiWorkerMirroredStrategy`, or one of a single "
                f"process. Received: {type(strategy).__name__}, under which "
                "Keras 3 does not `fit`."
            )
        self._strategy = strategy
        self._meet = tf.function(self._sum_of_ones, autograph=False)

    def share(self, statement: Any) -> list[Any]:
        """Return the statements of all workers, by worker.

        Every worker must call this equally often, in the same order. The
        workers wait for each other in a collective, in which TensorFlow
        notices one that has died; text travels in its key-value store.

        Args:
            statement: What JSON can hold.
        """
        if self.count == 1:
            return [statement]
        store = Coordination()
        key = f"tf_optimizers/workers/{next(_serial)}"
        store.write(f"{key}/{self.index}", json.dumps(statement))
        self._meet()
        texts = [
            store.read(f"{key}/{worker}", _READING_SECONDS)
            for worker in range(self.count)
        ]
        if None in texts:
            raise RuntimeError(
                "All workers must reach TensorFlow's key-value store. Received "
                f"nothing from worker {texts.index(None)} in "
                f"{_READING_SECONDS:g} s. Check the network to the first one."
            )
        return [json.loads(text) for text in texts if text is not None]

    def attempt(
        self,
        action: Callable[[], Any],
        expected: tuple[type[Exception], ...],
    ) -> tuple[list[Any], list[str]]:
        """Return the results of an action on all workers, and its errors.

        Args:
            action: Called on each worker; returns what JSON can hold.
            expected: Those of its errors that are returned, as text.
        """
        result, error = None, None
        try:
            result = action()
        except expected as caught:
            error = f"{caught} (worker {self.index})"
        outcomes = self.share([result, error])
        return (
            [result for result, _ in outcomes],
            [error for _, error in outcomes if error is not None],
        )

    def _sum_of_ones(self) -> None:
        def meet() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(
                tf.distribute.ReduceOp.SUM, tf.constant(1.0)
            )

        self._strategy.run(meet)
