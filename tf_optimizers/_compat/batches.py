"""Names of Keras and TensorFlow that decide how much a replica's rows count."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.losses import loss as keras_losses


def hook_batches(hooks: dict[str, Callable]) -> None:
    """Let hooks decide how much a replica's rows of a batch count.

    Keras scales losses in functions of a module without a public name, and
    takes moments in a private method. The other names are public, but nobody
    who calls them has a place for more than they do. From now on, in this
    process, each hook is called with the function that it replaces and that
    function's arguments.

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
    optimizers = [
        getattr(keras.optimizers, name)
        # Those that have methods of their own; the last is of Keras 3.12.
        for name in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
        if hasattr(keras.optimizers, name)
    ]
    for owner, name, key in (
        (keras_losses, "scale_loss_for_distribution", "scale"),
        (keras_losses, "unscale_loss_for_distribution", "unscale"),
        (keras_losses, "reduce_weighted_values", "reduce"),
        (tf.nn, "compute_average_loss", "average"),
        (tf.nn, "scale_regularization_loss", "regularize"),
        (keras.layers.BatchNormalization, "_moments", "moments"),
        *((optimizer, "apply", "apply") for optimizer in optimizers),
        *((optimizer, "scale_loss", "scale_loss") for optimizer in optimizers),
        (keras.metrics.Mean, "update_state", "update_mean"),
        (keras.Variable, "assign", "assign"),
    ):
        original = getattr(owner, name)
        if getattr(original, "hook", None) is not hooks[key]:  # Inherited.
            setattr(owner, name, _hooked(original, hooks[key]))


def _hooked(original: Callable, hook: Callable) -> Callable:
    """Return a function that calls the hook, and can be a method."""

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    call.hook = hook  # type: ignore[attr-defined]
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
