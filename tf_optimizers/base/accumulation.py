"""The sums of gradients that `gradient_accumulation_steps` keeps."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.keras import (
    accumulator,
    built_variables,
    micro_steps,
)


class Accumulators:
    """The sums of the gradients of some variables, in one call of `apply`.

    `is_full` is true in a call that updates the variables.

    Args:
        optimizer: The optimizer that has the accumulators.
        variables: The variables that have gradients.
        where: Where the accumulators are: `Replicas` or the host.
    """

    def __init__(
        self, optimizer: Any, variables: Sequence[Any], where: Any
    ) -> None:
        self._steps = optimizer.gradient_accumulation_steps
        self._totals = [accumulator(optimizer, v) for v in variables]
        self._all = [
            accumulator(optimizer, v) for v in built_variables(optimizer)
        ]
        self._where = where
        self.is_full = (micro_steps(optimizer) + 1) % self._steps == 0

    def add(self, gradients: Sequence[tf.Tensor]) -> None:
        """Add one gradient to each accumulator."""
        self._where.update_each(
            self._totals,
            lambda total, gradient: total.assign_add(gradient),
            gradients,
        )

    def means(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the means of all gradients; these are the last of them."""
        with self._where.scope():
            return [
                (total + gradient) / self._steps
                for total, gradient in zip(self._totals, gradients, strict=True)
            ]

    def clear(self) -> None:
        """Reset all, also for variables without a gradient in this call."""
        self._where.update_each(
            self._all, lambda total: total.assign(tf.zeros_like(total))
        )
