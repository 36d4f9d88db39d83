"""Updates the weights that this replica owns; sends them to all replicas."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_optimizers._compat.keras_internals import (
    built_variables,
    micro_steps,
    raw_iterations,
    variable_index,
    variable_key,
)
from tf_optimizers._compat.owned import Copy, own_rows
from tf_optimizers._compat.shown_averages import WholeAverages
from tf_optimizers._compat.strategies import Attribute, at_rate, replaced
from tf_optimizers.base.components import backend_variable, own_component
from tf_optimizers.base.gradients import clip_factor
from tf_optimizers.base.inner import InnerSteps
from tf_optimizers.base.precision import master_weight, refreshed
from tf_optimizers.kernels import compiled, norm, scaled
from tf_optimizers.replicas import replicas_of
from tf_optimizers.sharding.ownership import Piece
from tf_optimizers.sharding.slots import Slots

# Settings of the inner optimizer that are applied outside of its steps, and
# disabled within them.
_OUTSIDE = ("loss_scale_factor", "gradient_accumulation_steps", "use_ema")
_ASSIGNMENTS = ("assign", "assign_add", "assign_sub")
_NORMS = ("clipnorm", "global_clipnorm")


class OwnedSum(NamedTuple):
    """A gradient's sum over replicas, for a piece that this replica owns."""

    piece: Piece
    gradient: int  # The index of the gradient.
    total: tf.Tensor


class ShardedSteps:
    """Runs the steps of an optimizer whose state is distributed.

    Args:
        optimizer: The inner optimizer, built in the context `slots.of`.
        slots: The optimizer's state.
    """

    def __init__(self, optimizer: Any, slots: Slots) -> None:
        self._optimizer = optimizer
        self._variables = list(map(backend_variable, slots.variables))
        self._pieces = slots.pieces
        self._pieces_of: dict[int, list[Piece]] = {}
        for piece in self._pieces:
            self._pieces_of.setdefault(piece.index, []).append(piece)
        self._replicated = slots.replicated
        # The indices passed to `update` when it was last called in eager mode
        # or traced.
        self._stepped: set[int] = set()
        self._steps = InnerSteps(optimizer, slots.variables, slots.variables)
        if optimizer.use_ema:
            self._averages = WholeAverages(optimizer)
        self._group = replicas_of(slots.strategy)
        devices = self._group.devices
        first = self._group.worker * len(devices)
        self._copies = {
            piece: Copy(
                variable=self._variables[piece.index],
                ends=piece.ends,
                device=devices[piece.owner - first],
            )
            for piece in self._pieces
            if piece.ends and 0 <= piece.owner - first < len(devices)
        }

    def update(
        self, gradients: Sequence[tf.Tensor], indices: Sequence[int]
    ) -> None:
        """Update the variables on all replicas.

        Args:
            gradients: This replica's gradients, dense.
            indices: The index of each gradient's variable. A variable may
                have several gradients.
        """
        inner, rank = self._optimizer, self._group.rank
        updates = micro_steps(inner) // (inner.gradient_accumulation_steps or 1)
        sent = [
            (i, piece)
            for i, index in enumerate(indices)
            for piece in self._pieces_of[index]
        ]
        sums = self._group.sum_at_owners(
            [_rows_of(gradients[i], piece) for i, piece in sent],
            [piece.owner for _, piece in sent],
        )
        moved = self._stepped = set(indices)
        # An EMA changes even if its variable has no gradient.
        pieces = [
            piece
            for piece in self._pieces
            if inner.use_ema or piece.index in moved
        ]
        weights = {
            piece: self._weight(piece)
            for piece in pieces
            if piece.owner == rank
        }
        owned = [
            OwnedSum(piece, i, total)
            for (i, piece), total in zip(sent, sums, strict=True)
            if piece.owner == rank
        ]
        self._step(owned, weights, len(indices), updates)
        if inner.use_ema:
            self._average(weights, updates)
        self._broadcast(pieces, weights, indices[0])

    def _weight(self, piece: Piece) -> tf.Variable:
        """Return the variable to update: a weight, or a copy of its rows."""
        weight = own_component(self._variables[piece.index])
        if piece.is_whole:
            return weight
        copy = self._copies[piece]
        copy.take(_rows_of(weight.read_value(), piece))
        return copy

    def _step(
        self,
        owned: Sequence[OwnedSum],
        weights: Mapping[Piece, tf.Variable],
        count: int,
        updates: tf.Tensor,
    ) -> None:
        inner = self._optimizer
        settings: list[Attribute] = [(inner, name, None) for name in _OUTSIDE]
        if inner.gradient_accumulation_steps:
            # Keras's schedules count micro-batches, but the optimizer's formula
            # needs the number of updates. So read the rate before `iterations`
            # becomes the number of updates.
            rate = tf.convert_to_tensor(inner.learning_rate)
            settings.append(at_rate(inner, rate))
            own_component(raw_iterations(inner)).assign(updates)
        are_split = not all(piece.is_whole for piece in self._pieces)
        limit = inner.global_clipnorm or (inner.clipnorm if are_split else None)
        if limit and limit > 0:  # Keras ignores limits <= 0.
            owned = self._clipped(owned, count)
            settings += [(inner, name, None) for name in _NORMS]
        if self._replicated:
            step = functools.partial(
                self._update_step,
                inner.update_step,
                [(own_component(v), of) for v, of in self._replicated],
            )
            settings.append((inner, "update_step", step))
        self._steps.step_on_replica(
            [each.total for each in owned],
            [weights[each.piece] for each in owned],
            [each.piece.index for each in owned],
            settings,
        )

    def _update_step(
        self,
        step: Callable,
        replicated: Sequence[tuple[tf.Variable, int | None]],
        gradient: Any,
        variable: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Update a variable; raise if this changes other replicated state.

        Replicated state may change only in the update of its own variable.
        State that belongs to no variable may not change.
        """
        index = variable_index(self._optimizer, variable)
        others = [component for component, of in replicated if of != index]
        with replaced(
            (component, name, _reject_change)
            for component in others
            for name in _ASSIGNMENTS
        ):
            return step(gradient, variable, *args, **kwargs)

    def _clipped(self, owned: Sequence[OwnedSum], count: int) -> list[OwnedSum]:
        """Clip gradients by `clipnorm` or `global_clipnorm`.

        The norms cover whole gradients, including the rows of other replicas.
        """
        is_global = self._optimizer.global_clipnorm
        limit = is_global or self._optimizer.clipnorm
        groups = [0 if is_global else each.gradient for each in owned]
        # In float32, the squares of norms above 2e19 would be infinite, but
        # `norm` returns float64.
        squares = [tf.zeros([], tf.float64)] * count
        for group, each in zip(groups, owned, strict=True):
            squares[group] += tf.square(norm(each.total))
        norms = tf.sqrt(self._group.sum(tf.stack(squares)))
        factors = clip_factor(norms, limit)
        clipped = []
        for group, each in zip(groups, owned, strict=True):
            scale = compiled(scaled, each.total)
            total = scale(each.total, factors[group])
            clipped.append(each._replace(total=total))
        return clipped

    def _average(
        self, weights: Mapping[Piece, tf.Variable], updates: tf.Tensor
    ) -> None:
        """Update this replica's averages of weights.

        Every `ema_overwrite_frequency` updates, overwrite the weights with the
        averages.
        """
        inner = self._optimizer
        frequency = inner.ema_overwrite_frequency
        for piece, weight in weights.items():
            mean = _own(self._averages[piece.index])
            master = master_weight(inner, piece.index)
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
        """Set variables to their averages; call this between steps.

        Keras passes only the variables that are trainable now. If a variable
        was frozen after the step was traced, the step still updates it, so this
        method sets it, too.
        """
        inner = self._optimizer
        if int(micro_steps(inner)) < (inner.gradient_accumulation_steps or 1):
            return  # There are no averages yet.
        listed = {variable_key(inner, variable) for variable in variables}
        for index, shown in enumerate(built_variables(inner)):
            is_frozen = index in self._stepped and not shown.trainable
            if is_frozen or variable_key(inner, shown) in listed:
                variable = self._variables[index]
                value = self._averages[index].numpy()
                variable.assign(tf.cast(value, variable.dtype))

    def _broadcast(
        self,
        pieces: Sequence[Piece],
        weights: Mapping[Piece, tf.Variable],
        stepped: int,
    ) -> None:
        """Send the owners' weights and replicated state to all replicas.

        `stepped` is the index of any variable that the step has updated. The
        variable's first owner sends state that belongs to no variable.
        """
        whole = [own_component(variable) for variable in self._variables]
        state = [own_component(variable) for variable, _ in self._replicated]
        values = [
            weights[piece].read_value()
            if piece in weights
            else _rows_of(whole[piece.index].read_value(), piece)
            for piece in pieces
        ]
        values += [variable.read_value() for variable in state]
        owners = [piece.owner for piece in pieces]
        # All owners of a variable's rows have changed its replicated state in
        # the same way, so only the first owner sends this state.
        owners += [
            self._pieces_of[stepped if index is None else index][0].owner
            for _, index in self._replicated
        ]
        news = self._group.gather_from_owners(values, owners)
        parts: dict[int, list[tf.Tensor]] = {}
        for piece, new in zip(pieces, news, strict=False):
            # The owner of a whole weight already has the new value, but an
            # owner of rows has updated only a copy.
            if piece not in weights or not piece.is_whole:
                parts.setdefault(piece.index, []).append(new)
        for index, rows in parts.items():
            whole[index].assign(tf.concat(rows, 0) if rows[1:] else rows[0])
        for variable, new in zip(state, news[len(pieces) :], strict=True):
            variable.assign(new)
        for piece in weights:
            if not piece.is_whole:
                self._copies[piece].free()


def _reject_change(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "`update_step(gradient, variable, learning_rate)` may change only "
        "`variable` and its state. Received: a call that changes state that "
        "belongs to another variable, or to no variable. Create each "
        "variable's state with `self.add_variable_from_reference(variable, "
        "name)`, or use the inner optimizer without `ShardedState`."
    )


def _rows_of(value: tf.Tensor, piece: Piece) -> tf.Tensor:
    return value if piece.is_whole else value[piece.rows]


def _own(variable: Any) -> tf.Variable:
    """Return this replica's rows of a state variable."""
    return own_rows(own_component(variable))
