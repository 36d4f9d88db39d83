"""An exchange that goes on while the step computes its gradient.

    v of the step before ── select ── exchange ── apply, clear ─┐
    weights ── forward ── backward ── gradient ─────────────────┴─ add to v

What is sent is what the step before has left in v, so that it waits for
nothing of this one.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.keras import add_replica_variable, variable_index
from tf_optimizers._compat.replicas import switch_across_replicas
from tf_optimizers.base.gradients import densify
from tf_optimizers.base.precision import state_dtype
from tf_optimizers.compression import early
from tf_optimizers.compression.compressor import Accumulator, Compressor
from tf_optimizers.compression.residual import Increment, Residual
from tf_optimizers.compression.sending import send_all, send_largest, take_out
from tf_optimizers.compression.wire import Selection

# What was sent of each residual, if it is not all, and the sums.
Sent = tuple[Sequence[Selection], Sequence[Gradient]]


class DelayedCompressor(Compressor):
    """Sends in a step what the one before has left in residuals.

    Every variable has one; of those that are not compressed it is sent whole,
    as is that of any other while all is dense. Replicas accumulate what they
    have by themselves, at every stage. At sparsity 0 there is no delay: a step
    sends all there is, its own gradient included.
    """

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Get ready for the variables of a strategy."""
        super().build(strategy)
        self._whole: dict[int, Residual] = {}

    def add(
        self,
        optimizer: Any,
        variable: Any,
        accumulator: Accumulator,
        shared: keras.Variable | None = None,
    ) -> None:
        """Take on a variable, and create its residual."""
        del shared  # Nothing needs to be alike when all is dense.
        super().add(optimizer, variable, accumulator)
        index = variable_index(optimizer, variable)
        if index not in self._residuals:
            dtype = state_dtype(variable.dtype)
            v = add_replica_variable(optimizer, variable, "residual", dtype)
            self._whole[index] = Residual(v, self.wire)

    def prepare(
        self,
        optimizer: Any,
        gradients: Sequence[Gradient],
        variables: Sequence[tf.Variable],
    ) -> None:
        """Get ready for a step; XLA is refused before anything has changed."""
        del gradients
        indices = [variable_index(optimizer, v) for v in variables]
        self._allocate(
            [self._residuals[i] for i in indices if i in self._residuals]
        )

    def at_stage_apart(
        self,
        optimizer: Any,
        gradients: list[Gradient],
        send: Callable,
        function: Callable,
    ) -> None:
        """Call `function(sparsity, sent, gradients)` at this step's stage.

        `sent` is what `send(sparsity)` returned, which waits for no gradient.
        Both are traced once per stage of the schedule.
        """
        index, stages = self.stage(optimizer), self.schedule.stages
        begun = early.begin(
            index, [functools.partial(send, share) for share in stages]
        )

        def go_on(share: Any, sent: Callable, gradients: Any) -> None:
            function(share, sent(), gradients)

        switch_across_replicas(
            index,
            [
                functools.partial(go_on, share, sent)
                for share, sent in zip(stages, begun, strict=True)
            ],
            gradients,
        )

    def send(
        self,
        optimizer: Any,
        sparsity: float | None,
        variables: Sequence[tf.Variable],
        rate: tf.Tensor | None,
    ) -> Sent:
        """Exchange what residuals hold; for `rate` see `exchange`."""
        if sparsity == 0:
            return [], []
        indices = [variable_index(optimizer, v) for v in variables]
        largest, whole = self._parted(indices, sparsity)
        residuals = self._of(largest)
        return send_largest(
            self._choose(residuals, sparsity or 0.0),
            residuals,
            [residual.everything() for residual in self._of(whole)],
            tf.cast(optimizer.iterations, tf.int32),
            None if rate is None else self.wire.unit(rate),
        )

    def take_up(
        self,
        optimizer: Any,
        sparsity: float | None,
        sent: Sent,
        gradients: Sequence[Gradient],
        variables: Sequence[tf.Variable],
        weights: Sequence[tf.Variable],
        rate: tf.Tensor | None,
    ) -> list[Gradient]:
        """Take out what was sent, add gradients; return the updates.

        `sent` is what `send` returned; for others see `exchange`.
        """
        indices = [variable_index(optimizer, v) for v in variables]
        totals = self.sum_on_worker(densify(gradients, variables))
        increments = {
            i: self.accumulators[i].increment(total, weight, rate)
            for i, total, weight in zip(indices, totals, weights, strict=True)
        }
        if sparsity == 0:
            self._add(increments)
            masked = [
                increments[i].masked if i in self._residuals else ()
                for i in indices
            ]
            return send_all(self.wire, self._of(indices), masked, [], [])
        largest, whole = self._parted(indices, sparsity)
        selections, sums = sent
        masked = [increments[i].masked for i in largest]
        take_out(selections, self._of(largest), masked)
        for residual in self._of(whole):
            residual.empty(())
        self._add(increments)
        updates = dict(zip([*largest, *whole], sums, strict=True))
        return [updates[i] for i in indices]

    def _add(self, increments: dict[int, Increment]) -> None:
        for residual, increment in zip(
            self._of(increments), increments.values(), strict=True
        ):
            residual.add(increment)

    def _of(self, indices: Iterable[int]) -> list[Residual]:
        every = self._residuals | self._whole
        return [every[i] for i in indices]

    def _parted(
        self, indices: Sequence[int], sparsity: float | None
    ) -> tuple[list[int], list[int]]:
        """Return of which variables entries are sent, and all of which."""
        entries = [i for i in indices if sparsity and i in self._residuals]
        return entries, [i for i in indices if i not in entries]
