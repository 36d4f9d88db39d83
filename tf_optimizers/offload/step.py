"""Steps one variable in one kernel on the host.

m and v are updated in place. There is a kernel for each place that the weight
can be in: here (`move`), elsewhere (`update`), or here in full precision and
elsewhere rounded (`move_master`).
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.replicas import in_xla, temporary_variable
from tf_optimizers.base.precision import refreshed
from tf_optimizers.kernels import assign, compiled, read


def update(
    rule: Callable,
    hyperparameters: Any,
    gradient: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    size: tf.Tensor,
    weight: Any = None,
) -> tf.Tensor:
    """Update m and v; return what to subtract from a weight elsewhere.

    `m` and `v` are handles; `weight` is a value, needed only if it is decayed.
    """
    old = read(m, gradient), read(v, gradient)
    change, new_m, new_v = rule(hyperparameters, gradient, *old, size, weight)
    assign(m, new_m)
    assign(v, new_v)
    return change


def move(
    rule: Callable,
    hyperparameters: Any,
    gradient: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    size: tf.Tensor,
    weight: tf.Tensor,
) -> None:
    """Update in place the weight behind a handle on this device."""
    old = read(weight, gradient)
    assign(
        weight, old - update(rule, hyperparameters, gradient, m, v, size, old)
    )


def move_master(
    rule: Callable,
    hyperparameters: Any,
    value: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    size: tf.Tensor,
    gradient: tf.Tensor,
    master: tf.Tensor,
) -> tf.Tensor:
    """Update the master weight of a variable; return its new, rounded value.

    The gradient may be rounded, too.
    """
    gradient = tf.cast(gradient, tf.float32)
    old = refreshed(read(master, gradient), value)
    new = old - update(rule, hyperparameters, gradient, m, v, size, old)
    assign(master, new)
    return tf.cast(new, value.dtype)


def replaced(
    kernel: Callable,
    rule: Callable,
    hyperparameters: Any,
    old: tf.Tensor,
    *args: tf.Tensor,
) -> tf.Tensor:
    """Return what a kernel makes of its first tensor, in the memory of that.

    TensorFlow has allocated it for copies between devices, as `old` comes from
    another one. From any other memory, a copy to a GPU takes five times as
    long.
    """
    if in_xla():  # For this device, and it allocates as it likes.
        return compiled(kernel, old, rule, hyperparameters)(old, *args)
    like = tf.TensorSpec(old.shape, old.dtype)
    replace = compiled(_replace, old, kernel, rule, hyperparameters, like)
    buffer = temporary_variable(old)
    replace(buffer, *args)
    return read(buffer, like)


def _replace(
    kernel: Callable,
    rule: Callable,
    hyperparameters: Any,
    like: tf.TensorSpec,
    buffer: tf.Tensor,
    *args: tf.Tensor,
) -> None:
    old = read(buffer, like)
    assign(buffer, kernel(rule, hyperparameters, old, *args))
