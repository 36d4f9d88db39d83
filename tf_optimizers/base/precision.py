"""Keeps state, master weights and averages in full precision."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.keras import (
    average,
    built_variables,
    is_overwritten,
    variable_index,
)
from tf_optimizers.base.replicas import (
    backend_variable,
    local_component,
    value_of,
)

_HALF = ("float16", "bfloat16")
_FULL = ("float32", "float64")


def is_half(dtype: Any) -> bool:
    """Return whether a dtype is float16 or bfloat16."""
    return keras.backend.standardize_dtype(dtype) in _HALF


def state_dtype(dtype: Any) -> str:
    """Return the dtype of arithmetic and state: float32 for half precision."""
    dtype = keras.backend.standardize_dtype(dtype)
    return "float32" if dtype in _HALF else dtype


def check_floating(variable: Any) -> None:
    """Refuse variables that cannot be optimized."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if dtype not in _HALF + _FULL:
        raise TypeError(
            "A trainable variable must be of dtype float16, bfloat16, float32 "
            f"or float64. Received: {variable.name} of dtype {dtype}."
        )


def refreshed(master: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Return the up-to-date master weight of a variable with this value.

    A master weight holds more bits than its variable, and rounds to it. Where
    it does not, something else has assigned to the variable (`set_weights`, a
    constraint, a restored checkpoint), and the variable's value is taken.
    """
    # Compared as bits: XLA may elide a rounding to half precision and back.
    rounded = tf.bitcast(tf.cast(master, value.dtype), tf.uint16)
    is_stale = rounded != tf.bitcast(value, tf.uint16)
    return tf.where(is_stale, tf.cast(value, master.dtype), master)


class MasterWeights:
    """The master weights that an optimizer keeps for its variables."""

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self._weights = [
            _add_master_weight(optimizer, variable) for variable in variables
        ]

    def __getitem__(self, index: int) -> tf.Variable | None:
        """Return the master weight of the variable at an index, if any."""
        master = self._weights[index]
        return None if master is None else master.value

    def __iter__(self) -> Iterator[tf.Variable]:
        """Return an iterator over all master weights."""
        return (master.value for master in self._weights if master is not None)

    def in_place_of(self, variables: Sequence[Any]) -> list[Any]:
        """Return all variables, or the master weights of those that have."""
        return [
            variable if master is None else master
            for variable, master in zip(variables, self._weights, strict=True)
        ]

    def full_precision(self, index: int, variable: tf.Variable) -> tf.Variable:
        """Return a variable, or its component's up-to-date master weight.

        After assigning to the result, call `store_weight` to round it into a
        half-precision variable.
        """
        master = self[index]
        if master is None:
            return variable
        master = local_component(master, variable)
        value = value_of(variable)
        with tf.device(master.device):
            master.assign(refreshed(master.value(), value))
        return master


def store_weight(variable: tf.Variable, weight: tf.Variable) -> None:
    """Round `weight` into its variable, if it is a master weight."""
    if weight is not variable:
        variable.assign(tf.cast(weight, variable.dtype))


def _add_master_weight(optimizer: Any, variable: Any) -> keras.Variable | None:
    if is_overwritten(optimizer, variable) or not is_half(variable.dtype):
        return None
    # Zeros are replaced by the weights in the first step. Before, a model that
    # is built in a trace has none.
    return optimizer.add_variable_from_reference(variable, "master_weight")


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
