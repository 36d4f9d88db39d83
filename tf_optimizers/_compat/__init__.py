"""Private names of TensorFlow and Keras that the package depends on.

Tested with TensorFlow 2.16 and 2.21, and Keras 3.10, 3.12 and 3.15. If a new
version lacks a name, tests/base/test_compat.py reports it.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tf_optimizers needs Keras's TensorFlow backend. Received: "
        f"{keras.backend.backend()!r}. Set the environment variable "
        "KERAS_BACKEND=tensorflow before you import keras."
    )

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
# The type of `logs`, the last argument of callback methods.
Logs: TypeAlias = dict[str, Any] | None


def backend_variable(variable: Any) -> tf.Variable:
    """Return a Keras variable's `tf.Variable`, or another object unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def map_values(function: Callable, gradient: Gradient) -> Gradient:
    """Apply a function to a tensor, or to the values of `IndexedSlices`."""
    if not isinstance(gradient, tf.IndexedSlices):
        return function(gradient)
    values = function(gradient.values)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def distinct(objects: Iterable[Any]) -> list[Any]:
    """Return the objects without duplicates, compared by identity."""
    return list({id(each): each for each in objects}.values())
