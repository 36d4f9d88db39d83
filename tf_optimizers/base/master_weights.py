"""Float32 master weights of half-precision variables."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.keras import is_overwritten
from tf_optimizers.base.precision import is_half, refreshed
from tf_optimizers.base.replicas import local_component, value_of


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
