"""Gives all replicas the mean of their values of some variables."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def average(strategy: Any, variables: Sequence[Any]) -> None:
    """Assign the mean over all replicas, of all variables in one exchange."""
    if strategy.num_replicas_in_sync == 1 or not variables:
        return
    sizes = [math.prod(variable.shape) for variable in variables]

    # Of each replica of this worker, all values. The mean of equal float32
    # values is the same value in float64.
    parts = iter(
        [
            tf.concat(
                [tf.reshape(tf.cast(v, tf.float64), [-1]) for v in own], 0
            )
            for own in zip(
                *(components(strategy, variable) for variable in variables),
                strict=True,
            )
        ]
    )
    joined = strategy.experimental_distribute_values_from_function(
        lambda _: next(parts)
    )
    # Without what our strategy adds to it.
    total = tf.distribute.Strategy.reduce(
        strategy, tf.distribute.ReduceOp.MEAN, joined, axis=None
    )
    for variable, mean in zip(variables, tf.split(total, sizes), strict=True):
        mean = tf.cast(tf.reshape(mean, variable.shape), variable.dtype)
        for component in components(strategy, variable):
            component.assign(mean)


def components(strategy: Any, variable: Any) -> Sequence[tf.Variable]:
    """Return the copies of a variable in this process."""
    is_keras = isinstance(variable, keras.Variable)
    return strategy.experimental_local_results(
        variable.value if is_keras else variable
    )
