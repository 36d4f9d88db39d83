"""Checks, casts and clips the gradients passed to `apply`."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.base.precision import state_dtype
from tf_optimizers.kernels import (
    compiled,
    norm,
    norm_of,
    on_gpu,
    scaled,
    sum_rows,
)


def as_gradient(value: Any) -> Gradient | None:
    """Convert an array, or the arrays of `IndexedSlices`, to tensors.

    None is returned as None.
    """
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        parts = value.values, value.indices, value.dense_shape
        return tf.IndexedSlices(*map(as_gradient, parts))
    return tf.convert_to_tensor(value)


def in_state_dtype(
    gradients: Sequence[Gradient | None], variables: Sequence[Any]
) -> list[Gradient | None]:
    """Cast each gradient to the dtype of its variable's state.

    The results have static shapes, except for the number of rows of
    `tf.IndexedSlices`. The results are on the current device, so that
    TensorFlow reduces them there: an argument of a `tf.function` has no device.
    """
    return [
        None
        if gradient is None
        else tf.identity(
            tf.cast(_shaped(gradient, variable), state_dtype(variable.dtype))
        )
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _shaped(gradient: Gradient, variable: Any) -> Gradient:
    if not isinstance(gradient, tf.IndexedSlices):
        if gradient.shape.is_fully_defined():
            return gradient
        return tf.ensure_shape(gradient, variable.shape)
    values = gradient.values
    if not values.shape[1:].is_fully_defined():
        values = tf.ensure_shape(values, [None, *variable.shape[1:]])
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def densify(
    gradients: Sequence[Gradient | None], variables: Sequence[Any]
) -> list[tf.Tensor | None]:
    """Make gradients dense, with their variables' static shapes.

    Duplicate rows of `tf.IndexedSlices` are summed. None is returned as None.
    """
    return [
        None if gradient is None else as_dense(gradient, variable)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def as_dense(gradient: Gradient, variable: Any) -> tf.Tensor:
    """Make a gradient dense, with its variable's shape; see `densify`."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = sum_rows(
            gradient.values, gradient.indices, variable.shape[0]
        )
    return tf.ensure_shape(gradient, variable.shape)


def check_not_empty(gradients: Sequence[Any]) -> None:
    """Raise if all gradients are None, or if the list is empty."""
    if all(gradient is None for gradient in gradients):
        received = "None for every variable" if gradients else "an empty list"
        raise ValueError(
            f"`apply` needs at least one gradient. Received: {received}. Check "
            "that the model has trainable variables, that the loss depends on "
            "them, and that you passed a `loss` to `compile`."
        )


def check_gradients(
    gradients: Sequence[Gradient | None], variables: Sequence[Any]
) -> None:
    """Raise if the number of gradients, or a shape or dtype, is wrong."""
    if len(gradients) != len(variables):
        raise ValueError(
            "`apply` needs one gradient per variable. Received: "
            f"{len(gradients)} gradients and {len(variables)} variables. "
            "Pass a list with a gradient, or None, for each variable."
        )
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None:
            _check_gradient(gradient, variable)


def _check_gradient(gradient: Gradient, variable: Any) -> None:
    name = getattr(variable, "path", variable.name)
    expected = tf.TensorShape(variable.shape)
    values = gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values
        expected = tf.TensorShape([None]).concatenate(expected[1:])
    if not expected.is_compatible_with(values.shape):
        raise ValueError(
            "A gradient must have the shape of its variable. Received: a "
            f"gradient of shape {values.shape}, instead of {expected}, for "
            f"{name}. Pass gradients in the order of the variables."
        )
    if not values.dtype.is_floating:
        raise TypeError(
            "A gradient must have a floating-point dtype. Received: a gradient "
            f"of dtype {values.dtype.name} for {name}. Cast the gradient first."
        )


def clip(
    gradients: Sequence[tf.Tensor],
    clipnorm: float | None,
    global_clipnorm: float | None,
    clipvalue: float | None,
    xla: bool = True,
) -> list[tf.Tensor]:
    """Clip the norm of each gradient, the global norm, or each element.

    At most one limit may be given. If a norm is not finite, all elements that
    it covers become NaN. With `xla`, scaling takes one pass over memory;
    otherwise, each operation takes a pass.
    """
    if clipvalue:
        return [clip_elements(g, clipvalue) for g in gradients]
    if clipnorm and xla:
        return [clip_norm(g, clipnorm) for g in gradients]
    if clipnorm:
        factors = [clip_factor(norm(g), clipnorm) for g in gradients]
    elif global_clipnorm:
        size = tf.norm([norm(g) for g in gradients])
        factors = [clip_factor(size, global_clipnorm)] * len(gradients)
    else:
        return list(gradients)
    return [
        (compiled(scaled, g) if xla else scaled)(g, factor)
        for g, factor in zip(gradients, factors, strict=True)
    ]


def clip_norm(gradient: tf.Tensor, limit: float) -> tf.Tensor:
    """Clip the norm of a gradient; see `clip`."""
    return compiled(_clip_norm, gradient, on_gpu(), float(limit))(gradient)


def _clip_norm(
    gpu: bool, limit: float | tf.Tensor, gradient: tf.Tensor
) -> tf.Tensor:
    return scaled(gradient, clip_factor(norm_of(gpu, gradient), limit))


def clip_elements(gradient: tf.Tensor, limit: float | tf.Tensor) -> tf.Tensor:
    """Clip each element to [-limit, limit]; inf and NaN become NaN."""
    clipped = tf.clip_by_value(gradient, -limit, limit)
    return clipped + (gradient - gradient)


def clip_factor(size: tf.Tensor, limit: float | tf.Tensor) -> tf.Tensor:
    """Return the factor that clips a norm; NaN if the norm is not finite."""
    factor = tf.where(size > limit, limit / size, tf.ones_like(size))
    return factor + (size - size)
