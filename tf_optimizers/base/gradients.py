"""What `apply` accepts as a gradient, and how it becomes a dense tensor."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.base.precision import state_dtype


def as_gradient(value: Any) -> Gradient | None:
    """Convert anything that NumPy understands to tensors, in slices too."""
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        shape = value.dense_shape
        return tf.IndexedSlices(
            tf.convert_to_tensor(value.values),
            tf.convert_to_tensor(value.indices),
            None if shape is None else tf.convert_to_tensor(shape),
        )
    return tf.convert_to_tensor(value)


def in_state_dtype(
    gradients: Sequence[Gradient | None], variables: Sequence[Any]
) -> list[Gradient | None]:
    """Cast each gradient to the dtype of its variable's state.

    Of its shape as much is known then as of the variable's.

    The result is on the replica's device, which TensorFlow's reduction looks
    at; an argument of a `tf.function` has no device.
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
    """Return a gradient whose static shape is known, except for its rows."""
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
    """Return tensors of the variables' static shapes.

    Duplicate rows of `tf.IndexedSlices` are summed.
    """
    return [
        None if gradient is None else as_dense(gradient, variable)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def as_dense(gradient: Gradient, variable: Any) -> tf.Tensor:
    """Return a tensor of the variable's static shape; see `densify`."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.math.unsorted_segment_sum(
            gradient.values, gradient.indices, variable.shape[0]
        )
    return tf.ensure_shape(gradient, variable.shape)


def check_not_empty(gradients: Sequence[Any]) -> None:
    """Refuse an empty list."""
    if not gradients:
        raise ValueError(
            "`apply` needs at least one gradient. Received an empty list. "
            "Check that the model has trainable variables."
        )


def check_replica_context() -> None:
    """Refuse a call outside of `strategy.run`."""
    if tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            "`apply` must be called in a replica context. Received a call "
            "under `strategy.scope()`. Call it in a function that is passed "
            "to `strategy.run`."
        )


def check_gradients(
    gradients: Sequence[Gradient | None], variables: Sequence[Any]
) -> None:
    """Refuse a wrong number, shape or dtype."""
    if len(gradients) != len(variables):
        raise ValueError(
            "`apply` needs one gradient per variable. Received "
            f"{len(gradients)} gradients and {len(variables)} variables. "
            "Pass None for a variable without a gradient."
        )
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            "`apply` needs at least one gradient. Received None for every "
            "variable. Check that the loss depends on the variables, and "
            "that `compile` was given a `loss`."
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
            "A gradient must have the shape of its variable. Received a "
            f"gradient of shape {values.shape} for {name} of shape "
            f"{variable.shape}. Pass gradients in the order of the variables."
        )
    if not values.dtype.is_floating:
        raise TypeError(
            "A gradient must be of a floating dtype. Received a gradient of "
            f"dtype {values.dtype.name} for {name}. Cast it first."
        )
