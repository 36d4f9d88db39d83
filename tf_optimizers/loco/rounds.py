"""Rounds of local steps, which all replicas begin with the same weights.

    round begins         local steps              synchronization
    start <- w_i    ──   w_i <- inner step   ──   movement = start - w_i
                         (as many times           w_i <- start
                         as a round has)          exchange; update w_i alike

A synchronization may come early, where weights are about to be read.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.keras import is_overwritten
from tf_optimizers.base.replicas import (
    backend_variable,
    components,
    own_component,
)


class Rounds:
    """Keeps what the weights were when a round began, and counts its steps.

    Weights that others assign between rounds, in `fit`'s callbacks for
    example, are where the next round begins.

    Args:
        optimizer: Has this state.
        variables: All that the optimizer updates.
        masters: The master weights of those that have, else the same.
        steps: Local steps of a round.

    Attributes:
        variables: Those that move, of TensorFlow.
        steps: As above.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        masters: Sequence[Any],
        steps: int,
    ) -> None:
        moved = [
            (variable, master)
            for variable, master in zip(variables, masters, strict=True)
            if not is_overwritten(optimizer, variable)
        ]
        self.variables = [backend_variable(variable) for variable, _ in moved]
        self.steps = steps
        self._constrained = [
            variable
            for variable, _ in moved
            if getattr(variable, "constraint", None) is not None
        ]
        self._taken = optimizer.add_variable(
            shape=(), initializer="zeros", dtype="int64", name="local_steps"
        )
        self._starts = [
            optimizer.add_variable_from_reference(master, "common_weight")
            for _, master in moved
        ]
        self._early: dict[Hashable, Callable[[], Any]] = {}

    @property
    def taken(self) -> int:
        """The local steps since all replicas had the same weights."""
        return int(tf.convert_to_tensor(self._taken.value))

    def begin(self, weights: Sequence[tf.Variable]) -> None:
        """Note this replica's weights, if a round begins."""
        starts = list(map(own_component, self._starts))

        def note() -> None:
            for start, weight in zip(starts, weights, strict=True):
                start.assign(weight)

        tf.cond(own_component(self._taken) == 0, note, lambda: None)

    def count(self) -> tf.Tensor:
        """Count a local step; tell whether it was the last of its round."""
        taken = own_component(self._taken)
        taken.assign_add(1)
        return taken >= self.steps

    def end(self, weights: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """Return how far this replica has moved, and undo that."""
        starts = list(map(own_component, self._starts))
        movements = []
        for start, weight in zip(starts, weights, strict=True):
            with tf.device(start.device):
                movements.append(start - weight)
        for start, weight in zip(starts, weights, strict=True):
            weight.assign(start)
        own_component(self._taken).assign(0)
        return movements

    def end_early(
        self,
        strategy: tf.distribute.Strategy,
        end: Callable[[], None],
        key: Hashable,
    ) -> None:
        """Call `end` on every replica, in a function traced once per key."""

        def end_and_constrain() -> None:
            end()
            # Keras does so after a step.
            for variable in self._constrained:
                variable.assign(variable.constraint(variable))

        if key not in self._early:
            self._early[key] = tf.function(
                lambda: strategy.run(end_and_constrain), autograph=False
            )
        self._early[key]()


def average(strategy: tf.distribute.Strategy, variables: Sequence[Any]) -> None:
    """Assign the mean over all replicas, of all variables in one exchange."""
    if strategy.num_replicas_in_sync == 1 or not variables:
        return
    sizes = [math.prod(variable.shape) for variable in variables]

    def flat() -> tf.Tensor:
        # The mean of equal float32 values is the same value then.
        own = [
            tf.reshape(tf.cast(own_component(variable), tf.float64), [-1])
            for variable in variables
        ]
        return tf.concat(own, 0)

    total = strategy.reduce("MEAN", strategy.run(flat), axis=None)
    for variable, mean in zip(variables, tf.split(total, sizes), strict=True):
        mean = tf.cast(tf.reshape(mean, variable.shape), variable.dtype)
        for component in components(variable):
            component.assign(mean)
