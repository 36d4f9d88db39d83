"""Finds the model and the Python function of a step.

This module also uses private names of Keras to change or replace a step.
"""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_losses

from tf_optimizers._compat.patches import hook
from tf_optimizers._compat.strategies import Attribute

_STEPS = ("train_step", "test_step")


def merge_mask(sample_weight: Any, mask: Any, reduction: str) -> tf.Tensor:
    """Combine sample weights and a mask, as Keras does for a reduction."""
    # Keras has no public function for this.
    return keras_losses.apply_mask(
        sample_weight, mask, dtype="float32", reduction=reduction
    )


def sum_of_added_loss(model: Any, by: Callable) -> Attribute:
    """Return the attribute for `replaced` that sums each of `model.losses`.

    `by` is called with Keras's own function and a loss, and returns the sum.
    """
    name = "_aggregate_additional_loss"
    return model, name, functools.partial(by, getattr(model, name))


class ModelStep:
    """A function that Keras runs as a model's step, together with the model.

    Args:
        model: The model.
        function: The step, such as the model's `train_step`.
    """

    def __init__(self, model: keras.Model, function: Callable) -> None:
        self.model, self.function = model, function


def unmarked(function: Callable) -> Callable:
    """Return the function in a `ModelStep`, or another function unchanged."""
    return function.function if isinstance(function, ModelStep) else function


@functools.cache
def mark_steps(
    is_for: Callable[[tf.distribute.Strategy], bool],
    with_rounds: Callable[[keras.Model, Callable], Callable],
) -> None:
    """Permanently make Keras wrap train and test steps in a `ModelStep`.

    A `ModelStep` refers to the model. Some steps, such as a lambda or a
    function that a decorator returns, do not.

    Args:
        is_for: Called with a strategy; returns whether to wrap its steps.
        with_rounds: Called with a model and its train function; returns the
            train function to use instead.
    """

    def make_function(
        original: Callable, model: Any, step_function: Any
    ) -> Callable:
        if not is_for(model.distribute_strategy):
            return original(model, step_function)
        function = original(model, ModelStep(model, step_function))
        kind = _kind_of(model, list(_wrapped(step_function)))
        return (
            with_rounds(model, function) if kind == "train_step" else function
        )

    hook("Model._make_function", make_function)


@tf.autograph.experimental.do_not_convert
def step_of(function: Callable) -> tuple[keras.Model, Callable, str] | None:
    """Return the model of a step, the step's function, and the step's kind.

    Keras trains and evaluates with a `ModelStep`, and predicts with a function
    that refers to the model. Custom loops may run a method of the model. A
    `tf.function` or a decorator may wrap any of these functions.

    Returns:
        None if the function is not a step. The kind is "train_step",
        "test_step" or "predict_step", even if the function has another name.
        For a `tf.function` that trains or evaluates, the returned function is
        its Python function: a `tf.function` cannot apply an optimizer when a
        replica calls it.
    """
    known = function.model if isinstance(function, ModelStep) else None
    function = unmarked(function)
    *_, plain = chain = list(_wrapped(function))
    model = known or next(filter(None, map(_model_of_step, chain)), None)
    if model is not None:
        return model, _untraced(function), _kind_of(model, chain)
    found = _model_of_predict(plain)
    return found and (found, function, "predict_step")


def _wrapped(function: Any) -> Iterator[Any]:
    """Yield a function and the functions that it wraps, outermost first."""
    while function is not None:
        yield function
        inner = getattr(function, "python_function", None)
        function = inner or getattr(function, "__wrapped__", None)


def _model_of_step(function: Any) -> keras.Model | None:
    """Return the model of a method that is a step; None for other functions.

    A model's method is a step if it is named `train_step` or `test_step`, or if
    it is assigned to one of these attributes.
    """
    owner = getattr(function, "__self__", None)
    # TensorFlow binds methods to an object that has the model as `target`.
    model = getattr(owner, "target", owner)
    if not isinstance(model, keras.Model):
        return None
    is_step = getattr(function, "__name__", None) in _STEPS or any(
        function == getattr(model, name) for name in _STEPS
    )
    return model if is_step else None


def _kind_of(model: keras.Model, chain: list[Any]) -> str:
    """Return the kind of a step: "train_step" or "test_step".

    `chain` contains the step and the functions it wraps. If neither of the
    model's attributes with these names is in `chain`, the functions' own names
    decide. For example, the step may be a base class's method that the model's
    class overrides.
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
    """Return whether two functions are the same, ignoring `functools.partial`.

    A property may create a new `functools.partial` at each access.
    """
    return getattr(function, "func", function) == getattr(other, "func", other)


def traced_by(function: Any) -> Callable | None:
    """Return the Python function of a `tf.function`, None for other objects."""
    python: Any = getattr(function, "python_function", None)
    # TensorFlow binds methods to an object that has the owner as `target`.
    owner = getattr(getattr(python, "__self__", None), "target", None)
    return python if owner is None else types.MethodType(python.__func__, owner)


def asks_for_xla(function: Any) -> bool | None:
    """Return the `jit_compile` argument of a `tf.function`."""
    # The argument has no public accessor.
    return function._jit_compile


def _untraced(function: Any) -> Callable:
    """Return a `tf.function`'s Python function, converted by AutoGraph.

    Other functions are returned unchanged.
    """
    traced = traced_by(function)
    if traced is None:
        return function
    if not isinstance(traced, types.MethodType):
        return tf.autograph.to_graph(traced)
    converted = tf.autograph.to_graph(traced.__func__)
    return types.MethodType(converted, traced.__self__)


def _model_of_predict(function: Callable) -> keras.Model | None:
    """Return the model of Keras's predict function, None for other objects."""
    # Other packages, or the user, may have wrapped `keras.Model.predict`.
    trainer = next(
        each for each in keras.Model.mro()[1:] if "predict" in vars(each)
    )
    if getattr(function, "__module__", None) != trainer.__module__:
        return None
    cells = getattr(function, "__closure__", None) or ()
    models = [cell.cell_contents for cell in cells]
    return next((m for m in models if isinstance(m, keras.Model)), None)
