"""Steps one variable in one kernel on the host.

m and v are updated in place. There is a kernel for each place that the weight
can be in: here (`move`), elsewhere (`update`), or here in full precision and
elsewhere rounded (`move_master`).
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers.base.precision import refreshed
from tf_optimizers.kernels import assign, read


def update(
    rule: Callable,
    hyperparameters: Any,
    m: tf.Tensor,
    v: tf.Tensor,
    gradient: tf.Tensor,
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
    m: tf.Tensor,
    v: tf.Tensor,
    gradient: tf.Tensor,
    size: tf.Tensor,
    weight: tf.Tensor,
) -> None:
    """Update in place the weight behind a handle on this device."""
    old = read(weight, gradient)
    assign(
        weight, old - update(rule, hyperparameters, m, v, gradient, size, old)
    )


def move_master(
    rule: Callable,
    hyperparameters: Any,
    m: tf.Tensor,
    v: tf.Tensor,
    gradient: tf.Tensor,
    size: tf.Tensor,
    master: tf.Tensor,
    value: tf.Tensor,
) -> tf.Tensor:
    """Update the master weight of a variable; return its new, rounded value."""
    old = refreshed(read(master, gradient), value)
    new = old - update(rule, hyperparameters, m, v, gradient, size, old)
    assign(master, new)
    return tf.cast(new, value.dtype)
