"""Hooks what decides how much a replica's rows count."""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.losses import loss as keras_losses

from tf_optimizers._compat.patches import replace

_OPTIMIZERS = [
    name
    for name in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    if hasattr(keras.optimizers, name)  # The last is of Keras 3.12.
]
# Of the table of patches, by what hooks are called.
_KEYS = {
    "scale": ["loss.scale_loss_for_distribution"],
    "unscale": ["loss.unscale_loss_for_distribution"],
    "reduce": ["loss.reduce_weighted_values"],
    "average": ["nn.compute_average_loss"],
    "regularize": ["nn.scale_regularization_loss"],
    "moments": ["BatchNormalization._moments"],
    "apply": [f"{name}.apply" for name in _OPTIMIZERS],
    "scale_loss": [f"{name}.scale_loss" for name in _OPTIMIZERS[:2]],
    "update_mean": ["Mean.update_state"],
    "assign": ["Variable.assign"],
}
_STEPS = ("train_step", "test_step")


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
    for name, hook in hooks.items():
        for key in _KEYS[name]:
            replace(key, functools.partial(_hooked, hook))


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


class ModelStep:
    """What Keras runs as the step of a model, whatever it is called.

    Args:
        model: The model.
        function: Its step, called with a batch: a method, or any other.
    """

    def __init__(self, model: keras.Model, function: Callable) -> None:
        self.model, self.function = model, function


def unmarked(function: Callable) -> Callable:
    """Return what Keras runs, without the mark."""
    return function.function if isinstance(function, ModelStep) else function


@functools.cache
def mark_steps(is_for: Callable[[tf.distribute.Strategy], bool]) -> None:
    """Let Keras say what it runs as a model's step, from now on.

    In this process. A step that is a lambda, or that a decorator returns, does
    not tell its model, and may have any name.

    Args:
        is_for: Tells for which strategies.
    """

    def marking(make: Callable) -> Callable:
        @functools.wraps(make)
        def mark_and_make(model: Any, step_function: Callable) -> Callable:
            is_marked = is_for(model.distribute_strategy)
            step = ModelStep(model, step_function) if is_marked else None
            return make(model, step or step_function)

        return mark_and_make

    replace("Model._make_function", marking)


@tf.autograph.experimental.do_not_convert
def step_of(function: Callable) -> tuple[keras.Model, Callable, str] | None:
    """Return the model that Keras runs a step of, the step, and of which kind.

    `fit` and `evaluate` run a `ModelStep`, other loops a method. `predict` runs
    a function of Keras's, which refers to the model, and which it may have
    wrapped. A `tf.function` is returned as what it would trace: TensorFlow
    refuses to update variables in a function within a replica's.

    Returns:
        None of other functions. The kind is "train_step", "test_step" or
        "predict_step", whatever the step is called.
    """
    known = function.model if isinstance(function, ModelStep) else None
    function = unmarked(function)
    *_, plain = chain = list(_wrapped(function))
    model = known or next(filter(None, map(_model_of_step, chain)), None)
    if model is not None:
        return model, _untraced(function), _kind_of(model, chain)
    found = _predicts(plain)
    return found and (found, function, "predict_step")


def _wrapped(function: Any) -> Iterator[Any]:
    """Yield a function and what it wraps, from the outermost inwards."""
    while function is not None:
        yield function
        inner = getattr(function, "python_function", None)
        function = inner or getattr(function, "__wrapped__", None)


def _model_of_step(function: Any) -> keras.Model | None:
    """Return the model of which a method is a step, None of others.

    A method is one by its name, or if it is what the model has by that name.
    """
    owner = getattr(function, "__self__", None)
    # TensorFlow binds methods to an object of its own.
    model = getattr(owner, "target", owner)
    if not isinstance(model, keras.Model):
        return None
    is_step = getattr(function, "__name__", None) in _STEPS or any(
        function == getattr(model, name) for name in _STEPS
    )
    return model if is_step else None


def _kind_of(model: keras.Model, chain: list[Any]) -> str:
    """Return whether a model trains with a step: "train_step" or "test_step".

    What it may also test with is "test_step". A step that the model does not
    have, such as that of a base class, is known by its name.

    Args:
        model: The model.
        chain: The step, and what it wraps.
    """
    of_model = {
        name: any(_is_same(each, getattr(model, name)) for each in chain)
        for name in _STEPS
    }
    if not any(of_model.values()):
        names = {getattr(each, "__name__", None) for each in chain}
        return "train_step" if "train_step" in names else "test_step"
    return "test_step" if of_model["test_step"] else "train_step"


def _is_same(function: Any, other: Any) -> bool:
    """Return whether two functions are one, or partial calls of one.

    A property may make another partial call each time.
    """
    return getattr(function, "func", function) == getattr(other, "func", other)


def traced_by(function: Any) -> Callable | None:
    """Return what a `tf.function` would trace, None of others."""
    python: Any = getattr(function, "python_function", None)
    # TensorFlow binds methods to an object of its own.
    owner = getattr(getattr(python, "__self__", None), "target", None)
    return python if owner is None else types.MethodType(python.__func__, owner)


def asks_for_xla(function: Any) -> bool | None:
    """Return the `jit_compile` that a `tf.function` was made with."""
    # There is no public way to ask.
    return function._jit_compile


def _untraced(function: Any) -> Callable:
    """Return what a `tf.function` traces, converted; others as they are."""
    traced = traced_by(function)
    if traced is None:
        return function
    if not isinstance(traced, types.MethodType):
        return tf.autograph.to_graph(traced)
    converted = tf.autograph.to_graph(traced.__func__)
    return types.MethodType(converted, traced.__self__)


def _predicts(function: Callable) -> keras.Model | None:
    """Return the model that a function of Keras's trainer predicts with."""
    if getattr(function, "__module__", None) != trainer.__name__:
        return None
    cells = getattr(function, "__closure__", None) or ()
    models = [cell.cell_contents for cell in cells]
    return next((m for m in models if isinstance(m, keras.Model)), None)
