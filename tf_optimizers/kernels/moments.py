"""Adam's moments, and the correction of their bias."""

import math

import tensorflow as tf


def update_moments(
    beta_1: float,
    beta_2: float,
    gradient: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return Adam's moments of the gradient and of its square."""
    m = beta_1 * m + (1 - beta_1) * gradient
    # Scaled before squaring: the square of 1e20 alone overflows float32.
    v = beta_2 * v + tf.square(math.sqrt(1 - beta_2) * gradient)
    # The sum can still overflow. XLA vectorizes a select, but not a minimum.
    limit = tf.constant(v.dtype.max, v.dtype)
    return m, tf.where(v > limit, limit, v)


def bias_correction(beta: float, step: tf.Tensor) -> tf.Tensor:
    """Return 1 - beta^step to all digits of the dtype of `step`.

    In float32, 1 - 0.999 itself is wrong by 1.3e-5.
    """
    if beta == 0.0:
        return tf.ones_like(step)
    return -tf.math.expm1(step * math.log(beta))
