"""Restores the exact weights after a step has moved them away and back.

A step of sharpness-aware minimization adds e to the weights w, computes
gradients at w + e, and subtracts e again. Since e depends on a replica's rows,
the rounding error of w + e - e differs between replicas, and their weights
would drift apart. So each replica restores w exactly.

    the step assigns        w + e         w + e - e
    the replica then has    w + e         w
"""

import functools
from typing import Any

import keras
import tensorflow as tf

# The distance from 1 to the next larger number, by dtype.
_EPSILONS = {
    tf.float16: 2.0**-10,
    tf.bfloat16: 2.0**-7,
    tf.float32: 2.0**-23,
    tf.float64: 2.0**-52,
}
# A weight is restored only if the step has moved at least one element by more
# than this many times the bound on the element's rounding error.
_LEAST_MOVE = 16.0


class RestoredWeights:
    """The values that one replica's step has assigned to weights so far.

    Functions that are traced separately count as separate steps.
    """

    def __init__(self) -> None:
        # The initial value and the assigned values, by graph and weight.
        self._values: dict[tuple[int, int], list[tf.Tensor]] = {}

    def exact(self, weight: keras.Variable, value: Any) -> Any:
        """Return the value to assign to a weight in place of `value`.

        If `value` moves the weight back to its initial value up to rounding,
        the result is exactly the initial value. Otherwise, the result is
        `value`, cast to the weight's dtype. Weights with a dtype that is not in
        `_EPSILONS` are not restored, and `value` is returned unchanged.
        """
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
    """Return the initial value if the new value equals it up to rounding.

    Otherwise, return the new value. Also return the new value if the weight was
    close to its initial value before the assignment. Each assignment rounds by
    at most half of the distance to the next number.
    """
    start, *_, last = before
    largest = functools.reduce(tf.maximum, map(tf.abs, before))
    rounding = tf.cast(_EPSILONS[value.dtype] * len(before) / 2, value.dtype)
    tolerance = rounding * largest
    is_back = tf.reduce_all(abs(value - start) <= tolerance)
    was_away = tf.reduce_any(abs(last - start) > _LEAST_MOVE * tolerance)
    return tf.where(is_back & was_away, start, value)
