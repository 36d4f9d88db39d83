"""Exchanges the entries of a round while the next round runs.

A round is `sync_every` local steps on each replica. The last step of a round
adds the changes of weights to residuals, and starts an exchange. While the next
round runs, a thread exchanges the largest entries of the residuals, and updates
the common weights. The last step of the next round first waits for the thread.

step      round ends: accumulate, start       next round ends: wait, ...
thread                           exchange, update the common weights
"""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.keras_internals import strategy_of, variable_index
from tf_optimizers.compression.residual import subtract
from tf_optimizers.local_updates.rounds import Choice, Rounds, differences
from tf_optimizers.replicas import effects_of, replicas_of


class OverlappedExchange:
    """Exchanges a round's entries in a thread while the next round runs.

    Args:
        optimizer: A `SparseLoCo`.
        rounds: The optimizer's rounds, with `overlaps`.
    """

    def __init__(self, optimizer: Any, rounds: Rounds) -> None:
        self._optimizer, self._rounds = optimizer, rounds
        self._strategy = strategy_of(optimizer)
        self._call = replicas_of(self._strategy).later(self._exchange)
        self._choices: list[Choice] = []

    def finish(self) -> None:
        """Wait until all entries have arrived; call this between steps."""
        self._call.wait_for_all()

    def start(
        self,
        due: Sequence[tuple[Choice, tf.Tensor]],
        stepped: Sequence[tf.Variable],
    ) -> None:
        """Start to exchange a round's entries, if the round is over.

        Call this in a step.

        Args:
            due: Sets of variables, each with a bool tensor: whether to exchange
                the set now.
            stepped: The variables that the step updates.
        """
        self._optimizer._compressor.allocate()
        group = replicas_of()
        rank = group.rank % len(group.devices)

        def begin(choice: Choice) -> tf.Tensor:
            with tf.control_dependencies([self._call.wait(rank)]):
                effects = effects_of(
                    lambda: self._begin_next_round(choice, stepped)
                )
            with tf.control_dependencies(effects):
                return tf.constant(True)

        def send(choice: Choice) -> None:
            if choice not in self._choices:
                self._choices.append(choice)
            place = tf.constant(self._choices.index(choice), tf.int64)
            updates = tf.cast(self._optimizer.iterations, tf.int64)
            self._call.start(rank, tf.stack([updates, place]))

        for choice, is_due in due:
            begun = tf.cond(
                *(is_due, functools.partial(begin, choice)),
                lambda: tf.constant(False),
            )
            # This branch must contain no collective: `send` waits for the other
            # replicas of the process, and one of them could already be in the
            # collective, waiting for this replica.
            tf.cond(begun, functools.partial(send, choice), lambda: None)

    def _begin_next_round(
        self, choice: Choice, stepped: Sequence[tf.Variable]
    ) -> None:
        """Add the changes of weights to residuals, and begin the next round."""
        optimizer, rounds = self._optimizer, self._rounds
        compressor, variables = optimizer._compressor, rounds.chosen(choice)
        weights, (_, bases) = optimizer._weights(variables), rounds.kept(choice)
        indices, chosen, _ = self._positions(variables)
        ahead = differences(bases, weights)
        totals = compressor.sum_on_worker([ahead[i] for i in chosen])
        for i, total in zip(chosen, totals, strict=True):
            optimizer._accumulate_residual(indices[i], total, None, None)
            ahead[i] = compressor.unsent_updates(indices[i])
        rounds.begin_from_own_weights(weights, choice, ahead)
        optimizer._store(variables, weights)
        rounds.constrain(stepped, choice)

    def _positions(
        self, variables: Sequence[tf.Variable]
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the variables' indices, and two lists of positions.

        The first list has the positions of compressed variables in `variables`,
        and the second list has all other positions.
        """
        compressed = self._optimizer._compressor.compressed
        indices = [variable_index(self._optimizer, each) for each in variables]
        chosen = [i for i, index in enumerate(indices) if index in compressed]
        others = [i for i in range(len(indices)) if i not in chosen]
        return indices, chosen, others

    def _exchange(self, argument: tf.Tensor) -> None:
        """Exchange the entries of chosen variables after a round has ended.

        Args:
            argument: int64 [2]. The `iterations` of the optimizer at the end of
                the round, and the index of the choice in `_choices`.
        """
        updates, place = tf.unstack(argument)
        choice = self._choices[int(place)]
        # The strategy's own `run` would count this exchange as a step.
        run = functools.partial(tf.distribute.Strategy.run, self._strategy)

        def exchange(updates: tf.Tensor) -> None:
            send = functools.partial(self._send, choice, updates)
            with replicas_of().on_later_channel():
                self._optimizer._compressor.at_stage(updates, [], send)

        key = self._optimizer._sparse, choice, "overlapped"
        with self._strategy.scope():
            self._rounds.call(key, run, exchange, updates)

    def _send(
        self, choice: Choice, updates: tf.Tensor, sparsity: float | None, _: Any
    ) -> None:
        """Send the largest entries, and update the common weights."""
        compressor = self._optimizer._compressor
        commons, bases = self._rounds.kept(choice)
        indices, chosen, others = self._positions(self._rounds.chosen(choice))
        moved = differences(
            [commons[i] for i in others], [bases[i] for i in others]
        )
        sums = compressor.send(
            *(updates, sparsity, [indices[i] for i in chosen]),
            [each / compressor.wire.replicas for each in moved],
            tf.constant(1.0),
        )
        for i, total in zip([*chosen, *others], sums, strict=True):
            weight = commons[i]
            rate = self._optimizer.outer_learning_rate
            with tf.device(weight.device):
                rate = tf.constant(rate, weight.dtype)
                subtract(weight, total, rate, compressor.wire.replicas)
