"""Finds the copies of variables on devices, and accumulates gradients."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import backend_variable
from tf_optimizers._compat.keras_internals import (
    accumulator,
    built_variables,
    micro_steps,
)
from tf_optimizers._compat.tensorflow_internals import update_each
from tf_optimizers.replicas import replicas_of


def components(value: Any) -> Sequence[Any]:
    """Return the copies of a variable or value on this worker's devices."""
    return tf.distribute.get_strategy().experimental_local_results(
        backend_variable(value)
    )


def local_component(variable: Any, like: tf.Variable) -> tf.Variable:
    """Return a variable's copy on the device of `like`, or its only copy."""
    every = components(variable)
    if len(every) == 1:
        return every[0]
    return next(c for c in every if c.device == like.device)


def own_component(variable: Any) -> tf.Variable:
    """Return the calling replica's copy of a variable, or its only copy."""
    every = components(variable)
    return every[replicas_of().rank % len(every)]


def value_of(variable: tf.Variable) -> tf.Tensor:
    """Return the value of a variable's first copy on this worker.

    The value is on the device of that copy.
    """
    first = components(variable)[0]
    with tf.device(first.device):
        return first.value()


class OnReplicas:
    """Stores state on every replica, on the device of the weights."""

    update_each = staticmethod(update_each)

    def shown(self, optimizer: Any) -> list[Any]:
        """Return moving averages in the form that Keras's callbacks expect."""
        return optimizer._averages

    def scope(self) -> contextlib.AbstractContextManager:
        """Return a context for computations on the state."""
        return contextlib.nullcontext()

    def once(self, key: str, function: Callable) -> Any:
        """Return `function()`. Only `OnHost.once` uses the key."""
        return function()


class Accumulators:
    """The gradient accumulators of some variables, for one call to `apply`.

    Args:
        optimizer: The optimizer that accumulates.
        variables: The variables that have gradients.
        placement: `OnReplicas` or `OnHost`, where the accumulators are.

    Attributes:
        is_full: bool scalar. Whether this call completes the sums, and so
            updates the variables.
    """

    def __init__(
        self, optimizer: Any, variables: Sequence[Any], placement: Any
    ) -> None:
        self._steps = optimizer.gradient_accumulation_steps
        self._totals = [accumulator(optimizer, v) for v in variables]
        self._all = [
            accumulator(optimizer, v) for v in built_variables(optimizer)
        ]
        self._placement = placement
        self.is_full = (micro_steps(optimizer) + 1) % self._steps == 0

    def add(self, gradients: Sequence[tf.Tensor]) -> None:
        """Add each gradient to the accumulator of its variable."""
        self._placement.update_each(
            self._totals,
            lambda total, gradient: total.assign_add(gradient),
            gradients,
        )

    def means(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the mean gradients over all calls since the last update.

        If a variable has several gradients in this call, only the first mean
        includes the accumulated sum.
        """
        means, seen = [], set()
        with self._placement.scope():
            for total, gradient in zip(self._totals, gradients, strict=True):
                is_first = id(total) not in seen
                seen.add(id(total))
                whole = total + gradient if is_first else gradient
                means.append(whole / self._steps)
        return means

    def clear(self) -> None:
        """Set the accumulators of all the optimizer's variables to 0."""
        self._placement.update_each(
            self._all, lambda total: total.assign(tf.zeros_like(total))
        )
