"""The scalars that replicas return, reduced together."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class ScalarsOfRun:
    """The scalars that one `run` returned, to be reduced over replicas.

    Keras reduces the logs of a step one after another. A collective costs the
    same for all of them as for one, so the first that is reduced takes the
    others with it.
    """

    def __init__(
        self, strategy: Any, outputs: Any, alike: Sequence[Any] = ()
    ) -> None:
        """Keep the scalars.

        Args:
            strategy: The strategy.
            outputs: What its replicas have returned.
            alike: What is the same on all of them, scalars or others.
        """
        self._strategy = strategy
        self._graph = tf.compat.v1.get_default_graph()
        self._reduced: list[tuple[Any, Any, Any]] = [
            (value, tf.distribute.ReduceOp.MEAN, self._local(value))
            for value in alike
        ]
        self._waiting = [
            value
            for value in tf.nest.flatten(outputs)
            if _is_scalar(self._local(value))
            and not any(value is other for other in alike)
        ]

    def _local(self, value: Any) -> Any:
        return self._strategy.experimental_local_results(value)[0]

    def reduce(self, reduce_op: Any, value: Any) -> Any:
        """Return the value reduced, or None if it is not one of these."""
        if self._graph is not tf.compat.v1.get_default_graph():
            return None
        if any(value is other for other in self._waiting):
            results = self._reduce_together(reduce_op, self._waiting)
            self._reduced += [
                (other, reduce_op, result)
                for other, result in zip(self._waiting, results, strict=True)
            ]
            self._waiting = []
        for other, known_op, result in self._reduced:
            if other is value and known_op == reduce_op:
                return result
        return None

    def _reduce_together(self, reduce_op: Any, values: list[Any]) -> list[Any]:
        """Reduce in one collective, which runs beside the gradients'."""
        # The strategy's own `run` would take note of other scalars.
        stacked = tf.distribute.Strategy.run(
            self._strategy, lambda *scalars: tf.stack(scalars), values
        )
        reduced = self._strategy.extended.reduce_beside(reduce_op, stacked)
        return tf.unstack(self._strategy.experimental_local_results(reduced)[0])


def _is_scalar(value: Any) -> bool:
    return (
        tf.is_symbolic_tensor(value)
        and value.shape.rank == 0
        and value.dtype == tf.float32
    )
