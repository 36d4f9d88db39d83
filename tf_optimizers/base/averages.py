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
    variables = _averaged(optimizer)

    def update() -> None:
        # The first update sets the averages to the weights themselves.
        _follow(optimizer, masters, where, optimizer.iterations > 0)

    where.once("average", update)
    if frequency := optimizer.ema_overwrite_frequency:
        tf.cond(
            (optimizer.iterations + 1) % frequency == 0,
            lambda: assign_averages(optimizer, masters, variables),
            lambda: None,
        )


def start_averages(optimizer: Any, masters: MasterWeights, where: Any) -> None:
    """Set the averages to the weights, until there is an update.

    The arguments are those of `update_averages`.
    """

    def start() -> None:
        tf.cond(
            optimizer.iterations == 0,
            lambda: _follow(optimizer, masters, where, False),
            lambda: None,
        )

    where.once("first average", start)


def _averaged(optimizer: Any) -> list[tf.Variable]:
    return [
        backend_variable(variable)
        for variable in built_variables(optimizer)
        if not is_overwritten(optimizer, variable)
    ]


def _follow(
    optimizer: Any, masters: MasterWeights, where: Any, is_later: Any
) -> None:
    def follow(variable: tf.Variable) -> None:
        mean = local_component(average(optimizer, variable), variable)
        index = variable_index(optimizer, variable)
        weight = value_of(masters.full_precision(index, variable))
        momentum = optimizer.ema_momentum * tf.cast(is_later, mean.dtype)
        mean.assign(momentum * mean + (1 - momentum) * weight)

    where.update_each(_averaged(optimizer), follow)


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
