"""Variables of Keras or TensorFlow, and their copies on every device."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.replicas import update_each


def backend_variable(variable: Any) -> tf.Variable:
    """Return the `tf.Variable` of a `keras.Variable`."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def components(value: Any) -> Sequence[Any]:
    """Return the components of a variable or value on this worker."""
    return tf.distribute.get_strategy().experimental_local_results(
        backend_variable(value)
    )


def local_component(variable: Any, like: tf.Variable) -> tf.Variable:
    """Return the component of `variable` on the device of `like`."""
    every = components(variable)
    if len(every) == 1:
        return every[0]
    return next(c for c in every if c.device == like.device)


def own_component(variable: Any) -> tf.Variable:
    """Return the calling replica's component of `variable`."""
    every = components(variable)
    return every[local_rank(len(every))]


def local_rank(count: int) -> int:
    """Return the calling replica's rank among the `count` of its process."""
    context = tf.distribute.get_replica_context()
    # All workers have equally many replicas, numbered worker by worker.
    return tf.get_static_value(context.replica_id_in_sync_group) % count


def value_of(variable: tf.Variable) -> tf.Tensor:
    """Return the value of this worker's first copy, read on its device."""
    first = components(variable)[0]
    with tf.device(first.device):
        return first.value()


class Replicas:
    """Placement of state: a component per replica, next to its weights."""

    update_each = staticmethod(update_each)

    def scope(self) -> contextlib.AbstractContextManager:
        """Return the scope for computations on such state."""
        return contextlib.nullcontext()

    def once(self, key: str, function: Callable) -> Any:
        """Call `function`, which updates the components of all replicas."""
        del key
        return function()
