"""Steps each replica by itself, and exchanges pseudo-gradients."""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.averages import show_averages
from tf_optimizers._compat.keras import (
    is_overwritten,
    strategy_of,
    variable_index,
)
from tf_optimizers._compat.strategies import adopt
from tf_optimizers.base.gradients import densify
from tf_optimizers.base.replicas import own_component
from tf_optimizers.distribute.optimizers import note_local_steps, parts_of
from tf_optimizers.local_updates.checks import check_under
from tf_optimizers.local_updates.pseudo_gradients import (
    LocalSteps,
    worker_means,
)
from tf_optimizers.local_updates.rounds import Choice, Rounds


def adopt_inner(optimizer: Any, variables: Sequence[Any]) -> None:
    """Prepare a `SparseLoCo` and its inner optimizer to be built."""
    inner = optimizer.inner_optimizer
    for part in [optimizer, *parts_of(inner)]:
        adopt(part, variables)
    strategy = strategy_of(optimizer)
    check_under(inner, strategy, variables, optimizer._refused)


class LocalUpdates:
    """The local steps and exchanges of a `SparseLoCo`, which is being built.

    Args:
        optimizer: The optimizer; it compresses already.
        variables: All that it updates.

    Attributes:
        rounds: Of several steps, or None.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        inner, strategy = optimizer.inner_optimizer, strategy_of(optimizer)
        compressor = optimizer._compressor
        masters = optimizer._masters.in_place_of(variables)
        excluded = [
            weight
            for i, weight in enumerate(masters)
            if not optimizer._is_decayed(i)
        ]
        if optimizer.use_ema:
            show_averages(optimizer, inner)
        if excluded:
            inner.exclude_from_weight_decay(excluded)
        self._optimizer = optimizer
        self._steps = LocalSteps(inner, masters, variables)
        self._steps.build(strategy)
        # By now a callable of `MultiOptimizer` has chosen its optimizers.
        check_under(inner, strategy, variables, optimizer._refused)
        self.rounds: Rounds | None = None
        with self._steps.variables_beside_state():
            for variable in variables:
                if not is_overwritten(optimizer, variable):
                    compressor.add(optimizer, variable)
            if optimizer.sync_every > 1:
                note_local_steps(optimizer)
                self.rounds = Rounds(
                    optimizer, variables, masters, optimizer.sync_every
                )

    @property
    def is_synchronized(self) -> bool:
        """Whether all replicas have the same weights now."""
        return self.rounds is None or self.rounds.taken == 0

    def update(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> None:
        """Step locally; at the end of a round, exchange pseudo-gradients."""
        optimizer, rounds = self._optimizer, self.rounds
        compressor = optimizer._compressor
        gradients = compressor.prepare(
            *(optimizer, gradients, variables, rounds is not None)
        )
        means = worker_means(compressor, densify(gradients, variables))
        indices = [variable_index(optimizer, v) for v in variables]
        weights = optimizer._weights(variables)
        updates = tf.convert_to_tensor(optimizer.iterations)
        step = means, weights, indices, updates
        if rounds is None:
            pseudo_gradients = self._steps.pseudo_gradients(*step)
            send = functools.partial(self._send, variables)
            compressor.at_stage(optimizer, pseudo_gradients, send)
            return
        rounds.begin(optimizer._weights(rounds.variables), stepped=variables)
        self._steps.step(*step)
        self._store(variables, weights)
        due = rounds.exchanges(variables, rounds.count())
        self._end_round(rounds, due, variables)

    def end_early(self) -> None:
        """Synchronize, if weights have moved since they were common."""
        rounds = self.rounds
        if rounds is not None and not self.is_synchronized:
            sparse = self._optimizer._compressor.rows.indices
            rounds.end_early(
                strategy_of(self._optimizer),
                lambda choice: self._end_round(rounds, [(choice, None)]),
                None if sparse is None else tuple(sparse),
            )

    def _end_round(
        self,
        rounds: Rounds,
        due: Sequence[tuple[Choice, tf.Tensor | None]],
        stepped: Sequence[tf.Variable] = (),
    ) -> None:
        """Exchange the pseudo-gradients of a round, if it is over.

        Args:
            rounds: Has the weights that the round began with.
            due: Choices of weights, of which at most one is due; None says
                that it is.
            stepped: Variables of a step of Keras, if this is part of one.
        """
        compressor = self._optimizer._compressor
        compressor.allocate()
        is_known = compressor.rows.indices is not None

        def end(
            choice: Choice, sparsity: float | None, _: list[Gradient]
        ) -> None:
            variables = rounds.chosen(choice)
            weights = self._optimizer._weights(variables)
            pseudo_gradients = rounds.end(weights, choice)
            self._store(variables, weights)
            # Before it is known what is not compressed, all is sent.
            self._send(
                variables, sparsity if is_known else None, pseudo_gradients
            )
            rounds.constrain(stepped, choice)

        for choice, is_due in due:
            exchange = functools.partial(end, choice)
            compressor.at_stage(self._optimizer, [], exchange, is_due)

    def _send(
        self,
        variables: list[tf.Variable],
        sparsity: float | None,
        pseudo_gradients: list[Gradient],
    ) -> None:
        rate = tf.constant(self._optimizer.outer_learning_rate, tf.float64)
        self._optimizer._send(variables, sparsity, pseudo_gradients, None, rate)

    def _store(
        self,
        variables: Sequence[tf.Variable],
        weights: Sequence[tf.Variable],
    ) -> None:
        """Round this replica's weights into half-precision variables."""
        for variable, weight in zip(variables, weights, strict=True):
            self._optimizer._store_weight(own_component(variable), weight)
