"""Puts weights back exactly that a step moves there and back.

Sharpness-aware steps add e to the weights, take gradients there, and subtract
e again. e follows from the rows of a replica, and w + e - e is rounded: weights
would differ between replicas from then on. All had w, so all get it back.

    a step assigns       w + e         w + e - e
    a replica then has   w + e         w
"""

import functools
from typing import Any

import keras
import tensorflow as tf

# Of dtypes, the distance from 1 to the next larger number.
_EPSILONS = {
    tf.float16: 2.0**-10,
    tf.bfloat16: 2.0**-7,
    tf.float32: 2.0**-23,
    tf.float64: 2.0**-52,
}
# By how many times as much as rounding may do a weight must have been moved, to
# have been moved there and back.
_FAR = 16.0


class PutBack:
    """What a step of a replica has assigned to weights so far.

    A function that is traced on its own is a step of its own here.
    """

    def __init__(self) -> None:
        # By graph and weight: what it was before, and what was assigned.
        self._values: dict[tuple[int, int], list[tf.Tensor]] = {}

    def exact(self, weight: keras.Variable, value: Any) -> Any:
        """Return what to assign in place of a value."""
        dtype = tf.as_dtype(weight.dtype)
        if dtype not in _EPSILONS:
            return value
        value = tf.cast(value, dtype)
        key = id(tf.compat.v1.get_default_graph()), id(weight)
        before = self._values.setdefault(key, [])
        if before:
            value = _exact(value, before)
        else:
            before.append(tf.identity(tf.convert_to_tensor(weight)))
        before.append(value)
        return value


def _exact(value: tf.Tensor, before: list[tf.Tensor]) -> tf.Tensor:
    """Return the first of the values before, if this is it but for rounding.

    Each assignment rounds by half of the distance to the next number, at most.
    """
    start, *_, last = before
    largest = functools.reduce(tf.maximum, map(tf.abs, before))
    rounding = tf.cast(_EPSILONS[value.dtype] * len(before) / 2, value.dtype)
    tolerance = rounding * largest
    is_back = tf.reduce_all(abs(value - start) <= tolerance)
    was_away = tf.reduce_any(abs(last - start) > _FAR * tolerance)
    return tf.where(is_back & was_away, start, value)
