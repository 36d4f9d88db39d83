"""Compiles functions of tensors as TensorFlow graphs and as XLA kernels."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.replicas import eager_context


def compiled(
    function: Callable, like: Any, *constants: Any, xla: bool = True
) -> Callable:
    """Return `function` of `constants` and tensors as a `tf.function`.

    There is one per signature, shared by all optimizers and traced once, since
    TensorFlow warns of a single one that is traced for each shape in a model.
    Variables are passed as handles, to `read` and `assign`: a `tf.function`
    that was called with a variable refuses to run once that variable is gone,
    even when it is called with another.

    Args:
        function: Called as `function(*constants, *tensors)`.
        like: A tensor whose shape and dtype are part of the signature.
        *constants: Hashable.
        xla: Whether to compile it into one XLA kernel.
    """
    # A function of one context does not exist in another.
    signature = eager_context(), function, like.shape, like.dtype
    return made_in(*signature, *constants, xla=xla)


@functools.lru_cache(maxsize=4096)
def made_in(
    context: Any,
    function: Callable,
    shape: tf.TensorShape,
    dtype: tf.DType,
    *constants: Any,
    xla: bool,
) -> Callable:
    """Return what `compiled` returns, for one context of TensorFlow."""
    del context, shape, dtype
    return tf.function(
        functools.partial(function, *constants),
        jit_compile=True if xla else None,
        autograph=False,
    )


def read(handle: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Return the value of a variable of the shape and dtype of `like`."""
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=like.dtype)
    value.set_shape(like.shape)
    return value


def assign(handle: tf.Tensor, value: tf.Tensor) -> None:
    """Assign to a variable."""
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
