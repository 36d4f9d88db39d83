"""Moving averages of the weights, in full precision."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.keras import (
    average,
    built_variables,
    is_overwritten,
    variable_index,
)
from tf_optimizers.base.master_weights import MasterWeights
from tf_optimizers.base.replicas import (
    backend_variable,
    local_component,
    value_of,
)


def update_averages(optimizer: Any, masters: MasterWeights, where: Any) -> None:
    """Update the averages of the weights and, when due, overwrite the weights.

    Args:
        optimizer: The optimizer that has the averages.
        masters: Its master weights, averaged where a variable has one.
        where: Where the averages are: `Replicas` or the host.
    """
    variables = [
        backend_variable(variable)
        for variable in built_variables(optimizer)
        if not is_overwritten(optimizer, variable)
    ]

    def follow(variable: tf.Variable) -> None:
        mean = local_component(average(optimizer, variable), variable)
        index = variable_index(optimizer, variable)
        weight = value_of(masters.full_precision(index, variable))
        # The first update sets the average to the weights themselves.
        is_later = tf.cast(optimizer.iterations > 0, mean.dtype)
        momentum = optimizer.ema_momentum * is_later
        mean.assign(momentum * mean + (1 - momentum) * weight)

    where.once("average", lambda: where.update_each(variables, follow))
    if frequency := optimizer.ema_overwrite_frequency:
        tf.cond(
            (optimizer.iterations + 1) % frequency == 0,
            lambda: assign_averages(optimizer, masters, variables),
            lambda: None,
        )


def assign_averages(
    optimizer: Any, masters: MasterWeights, variables: Iterable[tf.Variable]
) -> None:
    """Overwrite variables, and their master weights, with their averages."""
    extended = tf.distribute.get_strategy().extended

    def assign(variable: tf.Variable) -> None:
        mean = local_component(average(optimizer, variable), variable)
        master = masters[variable_index(optimizer, variable)]
        with tf.device(mean.device):
            value = tf.cast(mean, variable.dtype)
            if master is not None:
                # The variable gets the rounded value.
                local_component(master, variable).assign(mean)
        variable.assign(value)

    for variable in variables:
        if average(optimizer, variable) is not None:
            extended.update(variable, assign, group=False)
