"""Stores state and master weights in full precision."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.keras_internals import is_overwritten, path_of
from tf_optimizers.base.components import (
    local_component,
    own_component,
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


def check_floating(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise if the dtype of a variable is not supported."""
    for variable in variables:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        is_valid = dtype in _HALF + _FULL or is_overwritten(optimizer, variable)
        if not is_valid:
            raise TypeError(
                "A trainable variable must be of dtype float16, bfloat16, "
                f"float32 or float64. Received: {path_of(variable)} of dtype "
                f"{dtype}. Create the variable with one of these dtypes, or "
                "with `trainable=False`."
            )


def refreshed(master: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Return a master weight, updated where its variable has changed.

    A master weight is the float32 copy of a half-precision variable. After a
    step, each element rounds to the variable's `value`. If an element no longer
    does, the variable has changed since then, for example by `set_weights`, a
    constraint or a restored checkpoint. The result has the new value there.
    At first, the master weight is 0, so the result is `value`.
    """
    # Compare bits: XLA may remove a cast to half precision and back.
    rounded = tf.bitcast(tf.cast(master, value.dtype), tf.uint16)
    is_stale = rounded != tf.bitcast(value, tf.uint16)
    return tf.where(is_stale, tf.cast(value, master.dtype), master)


class MasterWeights:
    """An optimizer's float32 copies of half-precision variables."""

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self._weights = [
            _add_master_weight(optimizer, variable) for variable in variables
        ]

    def __getitem__(self, index: int) -> tf.Variable | None:
        """Return the master weight of the variable at `index`, if any."""
        master = self._weights[index]
        return None if master is None else master.value

    def __iter__(self) -> Iterator[tf.Variable]:
        """Return an iterator over all master weights."""
        return (master.value for master in self._weights if master is not None)

    def in_place_of(self, variables: Sequence[Any]) -> list[Any]:
        """Return each variable's master weight, or the variable itself."""
        return [
            variable if master is None else master
            for variable, master in zip(variables, self._weights, strict=True)
        ]

    def full_precision(self, index: int, variable: tf.Variable) -> tf.Variable:
        """Return a variable's master weight, or the variable if it has none.

        First update the master weight where the variable has changed; see
        `refreshed`. After you assign to the result, call `store_weight`.
        """
        master = self[index]
        if master is None:
            return variable
        master = local_component(master, variable)
        value = value_of(variable)
        with tf.device(master.device):
            master.assign(refreshed(master.value(), value))
        return master


def master_weight(optimizer: Any, index: int) -> tf.Variable | None:
    """Return the master weight of the variable at `index`, if any."""
    masters = getattr(optimizer, "_masters", None)
    return None if masters is None else masters[index]


def store_weight(variable: tf.Variable, weight: tf.Variable) -> None:
    """Assign `weight` to `variable`, rounded to the dtype of `variable`.

    If both are the same variable, do nothing.
    """
    if weight is not variable:
        variable.assign(tf.cast(weight, variable.dtype))


def store_weights(
    variables: Sequence[Any], weights: Sequence[tf.Variable]
) -> None:
    """Assign this replica's weights to its components of `variables`."""
    for variable, weight in zip(variables, weights, strict=True):
        store_weight(own_component(variable), weight)


def _add_master_weight(optimizer: Any, variable: Any) -> keras.Variable | None:
    if is_overwritten(optimizer, variable) or not is_half(variable.dtype):
        return None
    # A master weight is 0 at first: if a model is built while a step is traced,
    # its weights have no values yet.
    return optimizer.add_variable_from_reference(variable, "master_weight")
