"""Steps Adam on one variable, as one kernel on the host.

m and v are updated in place. There is a kernel for each place that the weight
can be in: here (`move`), elsewhere (`update`), or here in full precision and
elsewhere rounded (`move_master`).
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tf_optimizers.base.precision import refreshed
from tf_optimizers.kernels.compiled import assign, read
from tf_optimizers.kernels.norms import bias_correction, update_moments


class AdamHyperparameters(NamedTuple):
    """The constants of a variable's step."""

    beta_1: float
    beta_2: float
    epsilon: float
    nesterov: bool
    weight_decay: float


def step_size(
    beta_1: float, beta_2: float, learning_rate: tf.Tensor, step: tf.Tensor
) -> tf.Tensor:
    """Return learning_rate sqrt(1 - beta_2^step) / (1 - beta_1^step)."""
    correction = tf.sqrt(bias_correction(beta_2, step))
    return learning_rate * correction / bias_correction(beta_1, step)


def adam(
    hyperparameters: AdamHyperparameters,
    gradient: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    size: tf.Tensor,
    weight: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return what to subtract from the weight, the new m, and the new v.

    `size` is what `step_size` returns. `weight` is only read if it is decayed.
    """
    beta_1, beta_2, epsilon, nesterov, weight_decay = hyperparameters
    if weight_decay:
        gradient += weight_decay * weight
    m, v = update_moments(beta_1, beta_2, gradient, m, v)
    ahead = beta_1 * m + (1 - beta_1) * gradient if nesterov else m
    # epsilon is added before the bias correction, which is part of `size`.
    return size * ahead / (tf.sqrt(v) + epsilon), m, v


def update(
    hyperparameters: AdamHyperparameters,
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
    change, new_m, new_v = adam(hyperparameters, gradient, *old, size, weight)
    assign(m, new_m)
    assign(v, new_v)
    return change


def move(
    hyperparameters: AdamHyperparameters,
    m: tf.Tensor,
    v: tf.Tensor,
    gradient: tf.Tensor,
    size: tf.Tensor,
    weight: tf.Tensor,
) -> None:
    """Update in place the weight behind a handle on this device."""
    old = read(weight, gradient)
    assign(weight, old - update(hyperparameters, m, v, gradient, size, old))


def move_master(
    hyperparameters: AdamHyperparameters,
    m: tf.Tensor,
    v: tf.Tensor,
    gradient: tf.Tensor,
    size: tf.Tensor,
    master: tf.Tensor,
    value: tf.Tensor,
) -> tf.Tensor:
    """Update the master weight of a variable; return its new, rounded value."""
    old = refreshed(read(master, gradient), value)
    new = old - update(hyperparameters, m, v, gradient, size, old)
    assign(master, new)
    return tf.cast(new, value.dtype)
