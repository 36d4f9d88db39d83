"""Reduces and gathers the values that replicas return."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.replicas import reduce_together
from tf_optimizers.workers.collectives.bits import (
    TAKEN,
    from_numbers,
    longest_in,
    to_numbers,
    to_strings,
    to_words,
)
from tf_optimizers.workers.collectives.message import pad_rows


def gather_any(
    strategy: Any, gather: Callable, value: Any, axis: int
) -> tf.Tensor:
    """Return the values of all replicas, one after another.

    Args:
        strategy: The strategy, outside of its replicas.
        gather: TensorFlow's, of a value and an axis.
        value: One for each replica.
        axis: Along which they are joined.
    """
    local = strategy.experimental_local_results(value)[0]
    tensor = tf.convert_to_tensor(local)
    dtype, axis = tensor.dtype, axis % (len(tensor.shape) or 1)

    def mapped(function: Callable, *args: Any) -> Any:
        # The strategy's own `run` would take note of what it returns.
        return tf.distribute.Strategy.run(strategy, function, args)

    if dtype != tf.string:
        numbers = value if dtype in TAKEN else mapped(to_numbers, value)
        return from_numbers(gather(numbers, axis), dtype)
    lengths = mapped(tf.strings.length, value)
    longest = gather(
        mapped(lambda x: tf.reshape(longest_in(x), [1]), lengths), 0
    )
    size = tf.reduce_max(longest)
    words = mapped(lambda x: to_words(x, size), value)
    return to_strings(gather(words, axis), gather(lengths, axis))


def fill_up_rows(strategy: Any, value: Any) -> Any:
    """Append zeros, eagerly, to values with fewer rows than those of others."""
    local = strategy.experimental_local_results(value)
    if len(local) < len(strategy.extended.worker_devices) or (
        isinstance(value, tf.Variable)
    ):
        return value  # of the host, not of replicas; or of one shape

    def map_local(function: Callable) -> Any:
        """Return `function(component, number of the replica)` of each."""
        remaining = iter(local)
        return strategy.experimental_distribute_values_from_function(
            lambda context: function(
                next(remaining), context.replica_id_in_sync_group
            )
        )

    replicas = strategy.num_replicas_in_sync
    rows = map_local(
        lambda component, replica: (
            tf.shape(component)[0]
            * tf.one_hot(replica, replicas, dtype=tf.int32)
        )
    )
    # The strategy's own method would fill these up, too.
    most = tf.reduce_max(
        tf.distribute.Strategy.reduce(
            strategy, tf.distribute.ReduceOp.SUM, rows, axis=None
        )
    )
    return map_local(lambda component, _: pad_rows(component, most))


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
        if isinstance(reduce_op, str):  # As Keras has it.
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        if any(value is other for other in self._waiting):
            # In one collective, which runs beside the gradients'.
            beside = functools.partial(
                self._strategy.extended.reduce_beside, reduce_op
            )
            results = reduce_together(self._strategy, beside, self._waiting)
            self._reduced += [
                (other, reduce_op, result)
                for other, result in zip(self._waiting, results, strict=True)
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
