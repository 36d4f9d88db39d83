"""Rows that are a replica's own, for functions that count rows themselves."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.counted import Counted, Rows
from tf_optimizers._compat.replicas import convert
from tf_optimizers.distribute.share import count_rows, local_rank

_as_it_is = tf.autograph.experimental.do_not_convert


def own_rows(function: Callable, arguments: Any) -> Callable:
    """Return a function to which replicas pass rows of their own only.

    What is no model's step counts rows by itself.

    Args:
        function: Called with each replica's part of the arguments.
        arguments: A pair of positional ones and others.
    """
    counts = _counts(arguments)
    if not any(counts):
        return function
    converted = convert(function)

    def take(value: Any, rows: Rows | None) -> Any:
        if rows is None:
            return value
        own = rows.own[local_rank(len(rows.own))]
        return take_or_leave(value, (own > 0) | (rows.total == 0))

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = tf.nest.flatten((args, kwargs))
        leaves = list(map(take, leaves, counts))
        args, kwargs = tf.nest.pack_sequence_as((args, kwargs), leaves)
        return converted(*args, **kwargs)

    return _as_it_is(call)


def take_or_leave(value: Any, is_taken: tf.Tensor) -> Any:
    """Return all rows of a value, or none."""
    rows = count_rows(value)
    if rows is None:
        return value
    rows = tf.where(is_taken, rows, tf.zeros_like(rows))
    if not isinstance(value, tf.SparseTensor):
        return value[:rows]
    shape = tf.concat([[rows], value.dense_shape[1:]], 0)
    return tf.sparse.slice(value, tf.zeros_like(shape), shape)


@_as_it_is
def _counts(arguments: Any) -> list[Rows | None]:
    """Return the rows for each leaf of arguments, None if not of a batch."""
    args, kwargs = arguments
    counts = []
    for argument in (*args, *(kwargs[name] for name in sorted(kwargs))):
        rows = None
        for leaf in tf.nest.flatten(argument):
            # Of a batch, the first tensor has them.
            if isinstance(leaf, Counted):
                rows = leaf.rows
            is_part = isinstance(leaf, tf.distribute.DistributedValues)
            counts.append(rows if is_part else None)
    return counts
