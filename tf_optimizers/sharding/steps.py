"""Steps with what a replica owns, and gives the results to all."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.averages import WholeAverages
from tf_optimizers._compat.keras import (
    micro_steps,
    raw_iterations,
    variable_index,
)
from tf_optimizers._compat.owned import Copy, part_of
from tf_optimizers._compat.strategies import at_rate
from tf_optimizers.agreement.workers import Workers, rank_among
from tf_optimizers.base.inner import InnerSteps
from tf_optimizers.base.precision import master_weight, refreshed
from tf_optimizers.base.replicas import backend_variable, own_component
from tf_optimizers.sharding.exchange import exchange_of, total_squares
from tf_optimizers.sharding.ownership import Piece
from tf_optimizers.sharding.slots import Slots

# What replicas do for the inner optimizer.
_DONE = ("loss_scale_factor", "gradient_accumulation_steps", "use_ema")
_NORMS = ("clipnorm", "global_clipnorm")


class OwnSteps:
    """The steps of an optimizer whose state is shared out.

    Args:
        optimizer: The inner optimizer, built in the scope of `slots`.
        variables: The model's variables.
        pieces: Their owners.
        slots: The optimizer's state.
        strategy: The strategy.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        pieces: Sequence[Piece],
        slots: Slots,
        strategy: tf.distribute.Strategy,
    ) -> None:
        self._optimizer = optimizer
        self._variables = list(map(backend_variable, variables))
        self._pieces = pieces
        self._shared = slots.shared
        self._replicas = strategy.num_replicas_in_sync
        self._exchange = exchange_of(strategy)
        self._steps = InnerSteps(optimizer, variables, variables)
        if optimizer.use_ema:
            self._averages = WholeAverages(optimizer)
        devices = strategy.extended.worker_devices
        first = Workers(strategy).index * len(devices)
        self._copies = {
            piece: Copy(
                variable=self._variables[piece.position],
                ends=piece.ends,
                device=devices[piece.owner - first],
            )
            for piece in pieces
            if piece.ends and 0 <= piece.owner - first < len(devices)
        }

    def update(self, gradients: Mapping[int, tf.Tensor]) -> None:
        """Update variables on all replicas.

        Args:
            gradients: This replica's, dense, by the positions of variables.
        """
        inner, rank = self._optimizer, rank_among(self._replicas)
        updates = micro_steps(inner) // (inner.gradient_accumulation_steps or 1)
        pieces = [
            piece for piece in self._pieces if piece.position in gradients
        ]
        sums = self._exchange.sum_at_owners(
            [_rows_of(gradients[piece.position], piece) for piece in pieces],
            [piece.owner for piece in pieces],
        )
        totals = dict(zip(pieces, sums, strict=True))
        if inner.use_ema:
            # Averages move without a gradient.
            pieces += [piece for piece in self._pieces if piece not in totals]
        own = [piece for piece in pieces if piece.owner == rank]
        weights = {piece: self._weight(piece) for piece in own}
        stepped = {piece: totals[piece] for piece in own if piece in totals}
        self._step(stepped, weights, updates)
        if inner.use_ema:
            self._average(weights, updates)
        self._spread(pieces, weights)

    def _weight(self, piece: Piece) -> tf.Variable:
        """Return what this replica steps: its weight, or some rows of it."""
        weight = own_component(self._variables[piece.position])
        if piece.is_whole:
            return weight
        copy = self._copies[piece]
        copy.take(_rows_of(weight.read_value(), piece))
        return copy

    def _step(
        self,
        gradients: Mapping[Piece, tf.Tensor],
        weights: Mapping[Piece, tf.Variable],
        updates: tf.Tensor,
    ) -> None:
        inner = self._optimizer
        settings = [(inner, name, None) for name in _DONE]
        if inner.gradient_accumulation_steps:
            # Schedules count micro-batches, and steps updates.
            rate = tf.convert_to_tensor(inner.learning_rate)
            settings.append(at_rate(inner, rate))
            own_component(raw_iterations(inner)).assign(updates)
        are_split = not all(piece.is_whole for piece in self._pieces)
        if inner.global_clipnorm or (inner.clipnorm and are_split):
            gradients = self._clipped(gradients)
            settings += [(inner, name, None) for name in _NORMS]
        self._steps.step_on_replica(
            list(gradients.values()),
            [weights[piece] for piece in gradients],
            [piece.position for piece in gradients],
            settings,
        )

    def _clipped(
        self, gradients: Mapping[Piece, tf.Tensor]
    ) -> dict[Piece, tf.Tensor]:
        """Clip by norms of what all replicas have, of one or all variables."""
        is_global = self._optimizer.global_clipnorm
        limit = is_global or self._optimizer.clipnorm
        groups = [0 if is_global else piece.position for piece in gradients]
        values = list(gradients.values())
        norms = tf.sqrt(total_squares(values, groups, len(self._variables)))
        scales = limit * tf.minimum(1.0 / norms, 1.0 / limit) + (norms - norms)
        return {
            piece: gradient * tf.cast(scales[group], gradient.dtype)
            for group, (piece, gradient) in zip(
                groups, gradients.items(), strict=True
            )
        }

    def _average(
        self, weights: Mapping[Piece, tf.Variable], updates: tf.Tensor
    ) -> None:
        """Let averages follow and, when due, overwrite what is owned."""
        inner = self._optimizer
        frequency = inner.ema_overwrite_frequency
        for piece, weight in weights.items():
            mean = _own(self._averages[piece.position])
            master = master_weight(inner, piece.position)
            new = weight.read_value()
            if master is not None:
                master = _own(master)
                new = refreshed(master.read_value(), new)
            keep = inner.ema_momentum * tf.cast(updates > 0, mean.dtype)
            mean.assign(keep * mean + (1 - keep) * new)
            if frequency:
                is_due = (updates + 1) % frequency == 0
                new = tf.where(is_due, mean, new)
                weight.assign(tf.cast(new, weight.dtype))
                if master is not None:
                    master.assign(new)

    def overwrite(self, variables: Sequence[Any]) -> None:
        """Set variables to their averages, outside of replicas."""
        if not int(micro_steps(self._optimizer)):
            return  # There are none yet.
        for variable in map(backend_variable, variables):
            mean = self._averages[variable_index(self._optimizer, variable)]
            variable.assign(tf.cast(mean.numpy(), variable.dtype))

    def _spread(
        self, pieces: Sequence[Piece], weights: Mapping[Piece, tf.Variable]
    ) -> None:
        """Give all replicas what owners have."""
        whole = [own_component(variable) for variable in self._variables]
        shared = list(map(own_component, self._shared))
        values = [
            weights[piece].read_value()
            if piece in weights
            else _rows_of(whole[piece.position].read_value(), piece)
            for piece in pieces
        ]
        values += [variable.read_value() for variable in shared]
        # The first piece has a gradient, and all with one move what is shared.
        owners = [piece.owner for piece in pieces]
        owners += owners[:1] * len(shared)
        news = self._exchange.gather(values, owners)
        parts: dict[int, list[tf.Tensor]] = {}
        for piece, new in zip(pieces, news, strict=False):
            # Owners have stepped their weights, or copies of some rows.
            if piece not in weights or not piece.is_whole:
                parts.setdefault(piece.position, []).append(new)
        for position, rows in parts.items():
            whole[position].assign(tf.concat(rows, 0) if rows[1:] else rows[0])
        for variable, new in zip(shared, news[len(pieces) :], strict=True):
            variable.assign(new)
        for piece in weights:
            if not piece.is_whole:
                self._copies[piece].free()


def _rows_of(value: tf.Tensor, piece: Piece) -> tf.Tensor:
    return value if piece.is_whole else value[piece.rows]


def _own(variable: Any) -> tf.Variable:
    """Return what this replica has of a variable of the state."""
    return part_of(own_component(variable))
