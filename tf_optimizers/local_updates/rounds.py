"""Runs rounds of local steps, which all replicas begin with the same weights.

    round begins         local steps              synchronization
    start <- w_i    ──   w_i <- inner step   ──   pseudo-gradient = start - w_i
                         (as many times           w_i <- start
                         as a round has)          exchange; update w_i alike

A synchronization may come early, where weights are about to be read.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_optimizers._compat.keras_internals import is_overwritten
from tf_optimizers.base.components import (
    backend_variable,
    components,
    own_component,
)

Choice: TypeAlias = tuple[bool, ...]  # Of all variables of an optimizer.


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
        # Which of them have moved in this round. Not saved: a round that is
        # resumed may have moved all.
        self._moved = tf.Variable(
            tf.zeros([len(self._starts)], tf.int64),
            trainable=False,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        self._early: dict[Hashable, Callable[[], Any]] = {}

    @property
    def taken(self) -> int:
        """The local steps since all replicas had the same weights."""
        return int(tf.convert_to_tensor(self._taken.value))

    def left(self) -> tf.Tensor:
        """Return how many local steps are left, in graphs too."""
        return self.steps - tf.convert_to_tensor(self._taken.value)

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables, of TensorFlow."""
        return [backend_variable(variable) for variable, _ in self._starts]

    def begin(
        self, weights: Sequence[tf.Variable], stepped: Sequence[tf.Variable]
    ) -> None:
        """Note this replica's weights, of all variables, if a round begins.

        `stepped` are the variables of the step that follows.
        """

        def note() -> None:
            for (_, start), weight in zip(self._starts, weights, strict=True):
                own_component(start).assign(weight)

        taken = own_component(self._taken)
        tf.cond(taken == 0, note, lambda: None)
        moved = own_component(self._moved)
        steps = [_is_in(stepped, variable) for variable, _ in self._starts]
        known = self._known(taken.read_value(), moved.read_value())
        moved.assign(tf.maximum(known, tf.constant(steps, tf.int64)))

    def _known(self, taken: tf.Tensor, moved: tf.Tensor) -> tf.Tensor:
        """Return what may have moved; in a round that is resumed, all."""
        is_resumed = (taken > 0) & tf.reduce_all(moved == 0)
        return tf.where(is_resumed, tf.ones_like(moved), moved)

    def exchanges(
        self, stepped: Sequence[tf.Variable], is_due: tf.Tensor
    ) -> list[tuple[Choice, tf.Tensor]]:
        """Return choices of variables to exchange, and whether each is due.

        Usually those that are not frozen, and those of a step that is being
        traced. Another step may have moved others in this round: what has been
        traced goes on after a variable was frozen.
        """
        usual = tuple(
            variable.trainable or _is_in(stepped, variable)
            for variable, _ in self._starts
        )
        if all(usual):
            return [(usual, is_due)]
        moved = own_component(self._moved).read_value()
        others = tf.reduce_any((moved > 0) & ~tf.constant(usual))
        every = (True,) * len(usual)
        return [(usual, is_due & ~others), (every, is_due & others)]

    def chosen(self, choice: Choice) -> list[tf.Variable]:
        """Return the variables, of TensorFlow, of a choice."""
        return list(itertools.compress(self.variables, choice))

    def count(self) -> tf.Tensor:
        """Count a local step; tell whether it was the last of its round."""
        taken = own_component(self._taken)
        taken.assign_add(1)
        return taken >= self.steps

    def end(
        self, weights: Sequence[tf.Variable], choice: Choice
    ) -> list[tf.Tensor]:
        """Return how far this replica's chosen weights moved; undo that."""
        chosen = itertools.compress(self._starts, choice)
        starts = [own_component(start) for _, start in chosen]
        pseudo_gradients = []
        for start, weight in zip(starts, weights, strict=True):
            with tf.device(start.device):
                pseudo_gradients.append(start - weight)
        for start, weight in zip(starts, weights, strict=True):
            weight.assign(start)
        own_component(self._taken).assign(0)
        moved = own_component(self._moved)
        moved.assign(tf.zeros_like(moved))
        return pseudo_gradients

    def constrain(self, stepped: Sequence[tf.Variable], choice: Choice) -> None:
        """Apply constraints, but of the variables of a step.

        Keras applies theirs after it.
        """
        for variable, _ in itertools.compress(self._starts, choice):
            if variable.constraint and not _is_in(stepped, variable):
                own = own_component(variable)
                own.assign(variable.constraint(own))

    def end_early(
        self,
        strategy: tf.distribute.Strategy,
        end: Callable[[Choice], None],
        sparse: Hashable,
    ) -> None:
        """Call `end` on every replica, with the variables to exchange.

        Those that are not frozen, or have moved in this round. It is traced
        once for each set of them, and of sparse gradients.
        """
        taken = tf.constant(self.taken, tf.int64)
        moved = self._known(taken, components(self._moved)[0].read_value())
        choice = tuple(
            variable.trainable or bool(has_moved)
            for (variable, _), has_moved in zip(
                self._starts, moved.numpy(), strict=True
            )
        )
        key = sparse, choice
        if key not in self._early:
            self._early[key] = tf.function(
                lambda: strategy.run(end, (choice,)), autograph=False
            )
        self._early[key]()


def _is_in(variables: Sequence[tf.Variable], variable: Any) -> bool:
    return any(each is backend_variable(variable) for each in variables)
