"""Clipping of dense gradients, by Keras's three arguments."""

from collections.abc import Sequence

import tensorflow as tf

from tf_optimizers.kernels.compiled import compiled
from tf_optimizers.kernels.norms import norm, norm_of, scaled


def clip(
    gradients: Sequence[tf.Tensor],
    clipnorm: float | None,
    global_clipnorm: float | None,
    clipvalue: float | None,
) -> list[tf.Tensor]:
    """Clip each gradient's norm, the norm of all of them, or each element.

    At most one limit is not None. If a gradient is not finite, everything that
    its norm would have scaled becomes NaN.
    """
    if clipnorm:
        return [compiled(_clip_norm, g, clipnorm)(g) for g in gradients]
    if global_clipnorm:
        size = tf.norm([norm(g) for g in gradients])
        factor = clip_factor(size, global_clipnorm)
        return [compiled(scaled, g)(g, factor) for g in gradients]
    if clipvalue:
        return [clip_elements(g, clipvalue) for g in gradients]
    return list(gradients)


def _clip_norm(limit: float, gradient: tf.Tensor) -> tf.Tensor:
    return scaled(gradient, clip_factor(norm_of(gradient), limit))


def clip_elements(gradient: tf.Tensor, limit: float) -> tf.Tensor:
    """Clip each element to [-limit, limit]; inf and NaN become NaN."""
    clipped = tf.clip_by_value(gradient, -limit, limit)
    return clipped + (gradient - gradient)


def clip_factor(size: tf.Tensor, limit: float) -> tf.Tensor:
    """Return the factor that limits a norm of `size`; NaN if not finite."""
    factor = tf.where(size > limit, limit / size, tf.ones_like(size))
    return factor + (size - size)
