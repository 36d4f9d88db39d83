"""Private names of Keras that decide how much a replica's rows count."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_losses
from keras.src.trainers import compile_utils


def hook_batches(
    scale: Callable,
    unscale: Callable,
    reduce: Callable,
    sum_up: Callable,
    moments: Callable,
) -> None:
    """Let hooks decide how much a replica's rows of a batch count.

    Keras decides this in functions of a module without a public name and in a
    private method, and offers no other place. From now on, in this process,
    each hook is called with Keras's function and that function's arguments.

    Args:
        scale: Turns a replica's mean loss into its part of the whole.
        unscale: The reverse, for metrics.
        reduce: Averages the losses of elements.
        sum_up: Adds up the losses that `compile` was given.
        moments: Returns what `BatchNormalization` takes as mean and variance.
    """
    for owner, name, hook in (
        (keras_losses, "scale_loss_for_distribution", scale),
        (keras_losses, "unscale_loss_for_distribution", unscale),
        (keras_losses, "reduce_weighted_values", reduce),
        (compile_utils.CompileLoss, "call", sum_up),
        (keras.layers.BatchNormalization, "_moments", moments),
    ):
        setattr(owner, name, _hooked(getattr(owner, name), hook))


def _hooked(original: Callable, hook: Callable) -> Callable:
    """Return a function that calls the hook, and can be a method."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return call


def merge_mask(sample_weight: Any, mask: Any, reduction: str) -> tf.Tensor:
    """Return the weights of a loss's elements, 0 where they are masked."""
    # Keras broadcasts the two by rules of its own, in private.
    return keras_losses.apply_mask(
        sample_weight, mask, dtype="float32", reduction=reduction
    )
