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

from tf_optimizers._compat.tensorflow_internals import effects_of
from tf_optimizers.base.precision import store_weights
from tf_optimizers.compression.compressor import Compressor
from tf_optimizers.compression.residual import subtract
from tf_optimizers.local_updates.rounds import Choice, Rounds, differences
from tf_optimizers.replicas import replicas_of


class OverlappedExchange:
    """Exchanges a round's entries in a thread while the next round runs.

    Args:
        optimizer: The `SparseLoCo`, with `overlap=True`.
        rounds: The optimizer's rounds.
    """

    def __init__(self, optimizer: Any, rounds: Rounds) -> None:
        self._optimizer, self._rounds = optimizer, rounds
        self._compressor: Compressor = optimizer._compressor
        group = replicas_of(self._compressor.strategy)
        self._call = group.later(self._exchange)
        self._choices: list[Choice] = []

    def finish(self) -> None:
        """Wait until all entries have arrived; call this between steps."""
        self._call.wait_for_all()

    def start(
        self,
        due: Sequence[tuple[Choice, tf.Tensor]],
        stepped: Sequence[tf.Variable],
        updates: Any,
    ) -> None:
        """Start to exchange a round's entries, if the round is over.

        Call this in a step.

        Args:
            due: Sets of variables, each with a bool tensor: whether to exchange
                the set now.
            stepped: The variables that the step updates.
            updates: The optimizer's `iterations`.
        """
        self._compressor.allocate(self._compressor.compressed)
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
            argument = tf.stack([tf.cast(updates, tf.int64), place])
            self._call.start(rank, argument)

        for choice, is_due in due:
            begun = tf.cond(
                is_due,
                functools.partial(begin, choice),
                lambda: tf.constant(False),
            )
            # This branch must contain no collective. The replicas of a process
            # share a queue, so TensorFlow runs their branches one after
            # another. A collective in one replica's branch would wait forever
            # for the same collective in the next replica's branch.
            tf.cond(begun, functools.partial(send, choice), lambda: None)

    def _begin_next_round(
        self, choice: Choice, stepped: Sequence[tf.Variable]
    ) -> None:
        """Add the changes of weights to residuals, and begin the next round."""
        rounds, compressor = self._rounds, self._compressor
        variables, indices = rounds.chosen(choice), rounds.indices(choice)
        weights = self._optimizer._weights(variables)
        moved = rounds.moved(weights, choice)
        chosen, _ = compressor.places(indices)
        totals = compressor.sum_on_worker([moved[i] for i in chosen])
        for i, total in zip(chosen, totals, strict=True):
            self._optimizer._accumulate_residual(
                indices[i], total, weights[i], None
            )
        rounds.begin_from_own_weights(weights, choice, moved)
        store_weights(variables, weights)
        rounds.constrain(stepped, choice)

    def _exchange(self, argument: tf.Tensor) -> None:
        """Exchange the entries of chosen variables after a round has ended.

        Args:
            argument: int64 [2]. The optimizer's `iterations` at the end of the
                round, and the index of the choice in `_choices`.
        """
        updates, place = tf.unstack(argument)
        choice = self._choices[int(place)]

        def exchange(updates: tf.Tensor) -> None:
            send = functools.partial(self._send, choice, updates)
            with replicas_of().on_later_channel():
                self._compressor.at_stage(updates, [], send)

        key = self._compressor.rows.indices, choice, "overlapped"
        with self._compressor.strategy.scope():
            run = replicas_of().run
            self._rounds.call(key, run, exchange, updates)

    def _send(
        self, choice: Choice, updates: tf.Tensor, sparsity: float | None, _: Any
    ) -> None:
        """Exchange entries, and update the common weights."""
        replicas = self._compressor.wire.replicas
        indices = self._rounds.indices(choice)
        chosen, others = self._compressor.places(indices)
        commons, bases = self._rounds.kept(choice)
        moved = differences(
            [commons[i] for i in others], [bases[i] for i in others]
        )
        sums = self._compressor.send(
            updates,
            sparsity,
            [indices[i] for i in chosen],
            [each / replicas for each in moved],
            tf.constant(1.0),
        )
        for i, total in zip([*chosen, *others], sums, strict=True):
            weight = commons[i]
            with tf.device(weight.device):
                rate = tf.constant(
                    self._optimizer.outer_learning_rate, weight.dtype
                )
                subtract(weight, total, rate, replicas)
