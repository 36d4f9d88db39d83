"""Records which variables have been compressed."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.base.gradients import as_dense
from tf_optimizers.compression.residual import Residual
from tf_optimizers.compression.sparsity_schedule import SparsitySchedule
from tf_optimizers.replicas import replicas_of


class CompressionHistory:
    """Records the variables whose gradients have been compressed.

    Such a variable has a residual, which a later step must send.

    Args:
        name: The optimizer's class, for error messages.
        schedule: The sparsity of each step.
        strategy: The strategy of the variables.
    """

    def __init__(
        self,
        name: str,
        schedule: SparsitySchedule,
        strategy: tf.distribute.Strategy,
    ) -> None:
        self._name = name
        self._schedule = schedule
        self._strategy = strategy
        self._indices: set[int] = set()
        self._is_begun = False
        # If the state was loaded after the cool-down, this step sends the
        # residuals.
        self._flush_step: int | None = None

    def begin(self, optimizer: Any, residuals: Mapping[int, Residual]) -> None:
        """Find the nonzero residuals of a loaded state, before the first step.

        They must be sent even after the cool-down, and even if their variables
        have sparse gradients now.
        """
        if self._is_begun:
            return
        with tf.init_scope():
            if tf.executing_eagerly():
                nonzero = self._nonzero(residuals)
                self._indices.update(nonzero)
                step = int(tf.convert_to_tensor(optimizer.iterations))
                if nonzero and self._schedule.is_over(step):
                    self._flush_step = step
        self._is_begun = True

    def _nonzero(self, residuals: Mapping[int, Residual]) -> list[int]:
        """Return the indices of residuals that are nonzero on any replica.

        Under TensorFlow's strategies, it is enough to check the replicas of
        this process: loading divides a residual evenly among all replicas.
        """
        own = [i for i, each in residuals.items() if each.is_nonzero()]
        every = replicas_of(self._strategy).agree("the first step", own)
        return sorted(set(itertools.chain(*every)))

    def stage(self, updates: Any) -> tf.Tensor:
        """Return the index of the schedule's stage after `updates` updates."""
        step = tf.cast(updates, tf.int64)
        schedule = self._schedule
        stage = schedule.stage(step)
        if self._flush_step is None:
            return stage
        is_flush = (step >= self._flush_step) & (
            step < self._flush_step + schedule.sync_every
        )
        sends_all = tf.cast(schedule.stages.index(0.0), stage.dtype)
        return tf.where(is_flush, sends_all, stage)

    def densify(
        self,
        indices: Sequence[int],
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
    ) -> list[Gradient]:
        """Make sparse gradients dense if their variable has been compressed.

        A sparse gradient is not compressed, and replicas compute the same
        update from it only if they have the same momentum. But compression
        makes a variable's momentum differ between replicas.
        """
        return [
            as_dense(gradient, variable) if i in self._indices else gradient
            for i, gradient, variable in zip(
                indices, gradients, variables, strict=True
            )
        ]

    def check(
        self, indices: list[int], paths: Sequence[str], is_all: bool
    ) -> None:
        """Raise if a variable has two gradients, or lacks a needed gradient.

        With a cool-down, every variable that has been compressed needs a
        gradient in every step.

        Args:
            indices: Indices of the variables that a step compresses.
            paths: Paths of all variables.
            is_all: Whether the step exchanges all variables, not only the
                variables in `indices`.
        """
        if len(set(indices)) < len(indices):
            twice = max(indices, key=indices.count)
            raise ValueError(
                f"`{self._name}` needs one gradient per variable. Received: "
                f"two gradients of {paths[twice]}. Pass their sum."
            )
        missing = self._indices.difference(indices)
        has_cool_down = self._schedule.rampdown_begin_step is not None
        if missing and has_cool_down and not is_all:
            raise ValueError(
                "With a cool-down (`rampdown_begin_step`), every variable must "
                "have a gradient in every step. Received: no gradient of "
                f"{paths[min(missing)]}, which had a gradient in an earlier "
                "step. Pass `rampdown_begin_step=None` and `rampdown_step=1`, "
                "or use a separate optimizer for variables without a gradient "
                "in some steps."
            )
        self._indices |= set(indices)
