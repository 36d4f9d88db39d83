"""Reduces and gathers the values that replicas return."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.replicas import replicas_of
from tf_optimizers.workers.collectives.bits import (
    GATHERED_DTYPES,
    from_numbers,
    longest_in,
    strings_to_words,
    to_numbers,
    words_to_strings,
)


def gather_any(
    strategy: Any, gather: Callable, value: Any, axis: int
) -> tf.Tensor:
    """Concatenate all replicas' values, of any dtype, along an axis.

    Call this function in cross-replica context. `gather` is TensorFlow's
    `Strategy.gather`, which supports few dtypes.
    """
    local = strategy.experimental_local_results(value)[0]
    tensor = tf.convert_to_tensor(local)
    dtype, axis = tensor.dtype, axis % (len(tensor.shape) or 1)
    run = replicas_of(strategy).run
    if dtype != tf.string:
        numbers = (
            value if dtype in GATHERED_DTYPES else run(to_numbers, [value])
        )
        return from_numbers(gather(numbers, axis), dtype)
    lengths = gather(run(tf.strings.length, [value]), axis)
    size = longest_in(lengths)
    words = run(lambda x: strings_to_words(x, size), [value])
    return words_to_strings(gather(words, axis), lengths)


def gather_rows(strategy: Any, rows: Any) -> tf.Tensor:
    """Concatenate all replicas' rows, in the order of the global batch.

    `strategy.gather` concatenates rows by rank. But consecutive parts of a
    batch belong to replicas of different workers; see `data_distribution.py`.
    Call this function in cross-replica context.
    """
    if tf.executing_eagerly():
        return strategy.gather_rows_in_function(rows)
    gathered = strategy.gather(rows, axis=0)
    extended, devices = strategy.extended, len(strategy.extended.worker_devices)
    if 1 in (extended.workers, devices):
        return gathered
    own = replicas_of(strategy).run(lambda own: tf.shape(own)[:1], [rows])
    counts = strategy.gather(own, axis=0)
    parts = tf.split(gathered, counts, num=extended.replicas)
    return tf.concat([p for i in range(devices) for p in parts[i::devices]], 0)


def copied(value: Any) -> tf.Tensor:
    """Return a copy of a value, as the first output of a new operation.

    Keras stacks the values of replicas. If all of them are the same output of
    one operation, TensorFlow's graph optimizer (2.21) wrongly stacks the first
    output of the operation. A copy by `tf.identity` does not prevent this.
    """
    return tf.ensure_shape(value, tf.convert_to_tensor(value).shape)


class ScalarsOfRun:
    """The float32 scalars that `strategy.run` returned in a graph.

    Custom loops reduce a step's outputs one by one. A collective for all
    scalars takes about as long as a collective for one. So the first call to
    `reduce` with one of these scalars reduces all of them.
    """

    def __init__(
        self, strategy: Any, outputs: Any, identical: Sequence[Any] = ()
    ) -> None:
        """Store the scalars.

        `identical` are outputs of any shape that are the same on all replicas.
        """
        self._strategy = strategy
        self._graph = tf.compat.v1.get_default_graph()
        self._reduced: list[tuple[Any, Any, Any]] = [
            (value, tf.distribute.ReduceOp.MEAN, self._local(value))
            for value in identical
        ]
        self._waiting = [
            value
            for value in tf.nest.flatten(outputs)
            if _is_scalar(self._local(value))
            and not any(value is other for other in identical)
        ]

    def _local(self, value: Any) -> Any:
        return self._strategy.experimental_local_results(value)[0]

    def reduce(self, reduce_op: Any, value: Any) -> Any:
        """Return the reduced value of a stored output.

        Return None for other values, in another graph, or if the output has
        already been reduced by another `reduce_op`.
        """
        if self._graph is not tf.compat.v1.get_default_graph():
            return None
        if isinstance(reduce_op, str):  # Keras passes a string.
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        if any(value is other for other in self._waiting):
            # Reduce all scalars in at most one collective, which can run in
            # parallel with the collectives of gradients.
            reduce = functools.partial(
                self._strategy.extended.reduce_in_parallel, reduce_op
            )
            group = replicas_of(self._strategy)
            results = group.reduce_together(self._waiting, reduce)
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
