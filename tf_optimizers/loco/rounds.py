"""Rounds of local steps, which all replicas begin with the same weights.

    round begins         local steps              synchronization
    start <- w_i    ──   w_i <- inner step   ──   movement = start - w_i
                         (as many times           w_i <- start
                         as a round has)          exchange; update w_i alike

A synchronization may come early, where weights are about to be read.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import keras
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
        steps: As above.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        masters: Sequence[Any],
        steps: int,
    ) -> None:
        self.steps = steps
        self._taken = optimizer.add_variable(
            shape=(), initializer="zeros", dtype="int64", name="local_steps"
        )
        self._starts = [
            (
                variable,
                optimizer.add_variable_from_reference(master, "common_weight"),
            )
            for variable, master in zip(variables, masters, strict=True)
            if not is_overwritten(optimizer, variable)
        ]
        self._stepped_frozen: set[int] = set()
        self._early: dict[Hashable, Callable[[], Any]] = {}

    @property
    def taken(self) -> int:
        """The local steps since all replicas had the same weights."""
        return int(tf.convert_to_tensor(self._taken.value))

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables, of TensorFlow."""
        return [backend_variable(variable) for variable, _ in self._starts]

    @property
    def trained(self) -> list[tf.Variable]:
        """Those that move; not what has been frozen."""
        return [backend_variable(variable) for variable, _ in self._trained()]

    def _trained(self) -> list[tuple[Any, keras.Variable]]:
        return list(itertools.compress(self._starts, self._are_trained()))

    def _are_trained(self) -> list[bool]:
        return [
            variable.trainable or i in self._stepped_frozen
            for i, (variable, _) in enumerate(self._starts)
        ]

    def begin(
        self, weights: Sequence[tf.Variable], stepped: Sequence[tf.Variable]
    ) -> None:
        """Note this replica's weights, of all variables, if a round begins.

        `stepped` are the variables of the step that follows.
        """
        self._stepped_frozen |= {
            i
            for i, (variable, _) in enumerate(self._starts)
            if not variable.trainable and _is_in(stepped, variable)
        }

        def note() -> None:
            for (_, start), weight in zip(self._starts, weights, strict=True):
                own_component(start).assign(weight)

        tf.cond(own_component(self._taken) == 0, note, lambda: None)

    def count(self) -> tf.Tensor:
        """Count a local step; tell whether it was the last of its round."""
        taken = own_component(self._taken)
        taken.assign_add(1)
        return taken >= self.steps

    def end(self, weights: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """Return how far this replica's trained weights moved; undo that."""
        starts = [own_component(start) for _, start in self._trained()]
        movements = []
        for start, weight in zip(starts, weights, strict=True):
            with tf.device(start.device):
                movements.append(start - weight)
        for start, weight in zip(starts, weights, strict=True):
            weight.assign(start)
        own_component(self._taken).assign(0)
        return movements

    def constrain(self, stepped: Sequence[tf.Variable]) -> None:
        """Apply constraints, but of the variables of a step.

        Keras applies theirs after it.
        """
        for variable, _ in self._trained():
            if variable.constraint and not _is_in(stepped, variable):
                own = own_component(variable)
                own.assign(variable.constraint(own))

    def end_early(
        self,
        strategy: tf.distribute.Strategy,
        end: Callable[[], None],
        sparse: Hashable,
    ) -> None:
        """Call `end` on every replica.

        It is traced once for each set of sparse gradients, and of variables
        that are not frozen.
        """
        key = sparse, *self._are_trained()
        if key not in self._early:
            self._early[key] = tf.function(
                lambda: strategy.run(end), autograph=False
            )
        self._early[key]()


def _is_in(variables: Sequence[tf.Variable], variable: Any) -> bool:
    return any(each is backend_variable(variable) for each in variables)


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
