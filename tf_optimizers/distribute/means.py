"""Reduces values of all replicas together, outside of these."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


def average(strategy: Any, variables: Sequence[Any]) -> None:
    """Assign the mean over all replicas, of all variables in one exchange."""
    if strategy.num_replicas_in_sync == 1 or not variables:
        return
    # The mean of equal float32 values is the same value in float64.
    means = reduce_together(
        strategy, reducing(strategy, "MEAN"), variables, tf.float64
    )
    for variable, mean in zip(variables, means, strict=True):
        for component in components(strategy, variable):
            component.assign(tf.cast(mean, variable.dtype))


def reducing(strategy: Any, reduce_op: str) -> Callable[[Any], Any]:
    """Return TensorFlow's `reduce`, without what our strategy adds to it."""
    op = tf.distribute.ReduceOp(reduce_op)
    return lambda value: tf.distribute.Strategy.reduce(
        strategy, op, value, axis=None
    )


def reduce_together(
    strategy: Any,
    reduce: Callable[[Any], Any],
    values: Sequence[Any],
    dtype: tf.DType | None = None,
) -> list[tf.Tensor]:
    """Return reduced values; those of one dtype travel in one tensor.

    Args:
        strategy: The strategy, outside of its replicas.
        reduce: Called with a tensor of each replica; returns what these are
            reduced to.
        values: Tensors of each replica, or variables, of known shapes.
        dtype: What they are cast to before. Defaults to their own.
    """
    local = [components(strategy, value) for value in values]
    groups: dict[tf.DType, list[int]] = {}
    for i, (first, *_) in enumerate(local):
        groups.setdefault(dtype or first.dtype, []).append(i)
    reduced: dict[int, tf.Tensor] = {}
    for kind, group in groups.items():
        join = functools.partial(_join, kind)
        if tf.executing_eagerly():
            own = zip(*(local[i] for i in group), strict=True)
            joined = strategy.experimental_distribute_values_from_function(
                lambda _, join=join, own=own: join(*next(own))
            )
        else:
            # Our strategy's own `run` would take note of what it returns.
            joined = tf.distribute.Strategy.run(
                strategy, join, [values[i] for i in group]
            )
        total = strategy.experimental_local_results(reduce(joined))[0]
        shapes = [local[i][0].shape for i in group]
        parts = tf.split(total, list(map(math.prod, shapes)))
        reduced |= zip(group, map(tf.reshape, parts, shapes), strict=True)
    return [reduced[i] for i in range(len(values))]


def _join(dtype: tf.DType, *values: Any) -> tf.Tensor:
    flat = [tf.reshape(tf.cast(value, dtype), [-1]) for value in values]
    return tf.concat(flat, 0)


def components(strategy: Any, variable: Any) -> Sequence[tf.Variable]:
    """Return the copies of a variable in this process."""
    is_keras = isinstance(variable, keras.Variable)
    return strategy.experimental_local_results(
        variable.value if is_keras else variable
    )
