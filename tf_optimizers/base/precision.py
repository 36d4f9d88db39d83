"""The dtype of the state, and master weights for half precision."""

from typing import Any

import keras
import tensorflow as tf

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
