"""The scalars that replicas return, reduced together."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class ScalarsOfRun:
    """The scalars that one `run` returned, to be reduced over replicas.

    Keras reduces the logs of a step one after another. A collective costs the
    same for all of them as for one, so the first that is reduced takes the
    others with it.

    Args:
        outputs: The nest of values that `run` returned.
        local_results: Returns the components of such a value.
    """

    def __init__(
        self, outputs: Any, local_results: Callable[[Any], tuple[Any, ...]]
    ) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._waiting = [
            value
            for value in tf.nest.flatten(outputs)
            if _is_scalar(local_results(value)[0])
        ]
        self._reduced: list[tuple[Any, Any, Any]] = []

    def take(
        self,
        reduce_op: Any,
        value: Any,
        reduce: Callable[[list[Any]], list[Any]],
    ) -> Any:
        """Return the value reduced, or None if it is not one of these.

        Args:
            reduce_op: As given to `reduce`.
            value: What is to be reduced.
            reduce: Reduces a list of values in one collective.
        """
        if self._graph is not tf.compat.v1.get_default_graph():
            return None
        if any(value is other for other in self._waiting):
            self._reduced = [
                (other, reduce_op, result)
                for other, result in zip(
                    self._waiting, reduce(self._waiting), strict=True
                )
            ]
            self._waiting = []
        for other, known_op, result in self._reduced:
            if other is value and known_op == reduce_op:
                return result
        return None


def _is_scalar(value: Any) -> bool:
    return (
        tf.is_symbolic_tensor(value)
        and value.shape.rank == 0
        and value.dtype == tf.float32
    )
