"""Hooks what decides how much a replica's rows count."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.losses import loss as keras_losses

from tf_optimizers._compat.patches import replace

# Of names in the table of patches, by what hooks are called.
_ENDS = {
    "scale": "scale_loss_for_distribution",
    "unscale": "unscale_loss_for_distribution",
    "reduce": "reduce_weighted_values",
    "average": "compute_average_loss",
    "regularize": "scale_regularization_loss",
    "moments": "_moments",
    "apply": "apply",
    "scale_loss": "scale_loss",
    "update_mean": "Mean.update_state",
    "assign": "assign",
}


def hook_batches(hooks: dict[str, Callable]) -> None:
    """Let hooks decide how much a replica's rows of a batch count.

    From now on, in this process, each hook is called with the function that it
    replaces and that function's arguments.

    Args:
        hooks: By name:
            "scale": What turns a replica's mean loss into its part.
            "unscale": The reverse, for metrics.
            "reduce": What averages the losses of elements.
            "average", "regularize": TensorFlow's ways to do the first.
            "moments": What `BatchNormalization` takes as mean and variance.
            "apply", "scale_loss": Methods of all optimizers.
            "update_mean": What adds to a `keras.metrics.Mean`.
            "assign": What changes a `keras.Variable`.
    """
    for key, hook in hooks.items():
        replace(_ENDS[key], functools.partial(_hooked, hook))


def _hooked(hook: Callable, original: Callable) -> Callable:
    """Return a function that calls the hook, and can be a method."""

    @tf.autograph.experimental.do_not_convert
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


@tf.autograph.experimental.do_not_convert
def step_of(function: Callable) -> tuple[keras.Model, Callable, bool] | None:
    """Return the model that Keras runs a step of, the step, and if it predicts.

    `fit` and `evaluate` run methods of the model. `predict` runs a function of
    Keras's, which refers to the model, and which it may have wrapped. A method
    that is a `tf.function` is returned as what that would trace: TensorFlow
    refuses to update variables in a function within a replica's.

    Returns:
        None of other functions.
    """
    plain = inspect.unwrap(getattr(function, "python_function", function))
    owner = getattr(plain, "__self__", None)
    # TensorFlow binds methods to an object of its own.
    model = getattr(owner, "target", owner)
    if not isinstance(model, keras.Model):
        found = _predicts(plain)
        return found and (found, function, True)
    if plain.__name__ not in ("train_step", "test_step"):
        return None
    if model is not owner:
        converted = tf.autograph.to_graph(plain.__func__)
        function = types.MethodType(converted, model)
    return model, function, False


def _predicts(function: Callable) -> keras.Model | None:
    """Return the model that a function of Keras's trainer predicts with."""
    if getattr(function, "__module__", None) != trainer.__name__:
        return None
    cells = getattr(function, "__closure__", None) or ()
    models = [cell.cell_contents for cell in cells]
    return next((m for m in models if isinstance(m, keras.Model)), None)
