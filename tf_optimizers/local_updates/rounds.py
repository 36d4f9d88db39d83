"""Counts local steps, and keeps the weights from the start of each round.

    round begins         local steps              synchronization
    start <- w_i    ──   w_i <- inner step   ──   pseudo-gradient = start - w_i
                         (`steps` times)          w_i <- start
                                                  exchange; update w_i

Here w_i are the weights of replica i. A round ends early if weights must be
equal, for example for an evaluation.

With `step_ahead`, a fraction of replica i's unsent updates is applied to w_i
before the local steps. The variable `base` holds these weights, and the
pseudo-gradient is base - w_i.

With `overlap`, replicas exchange the entries of a round while the next round
runs. Replicas continue from their own weights. Two variables replace `start`:
`common` holds the weights that are equal on all replicas, and `base` holds a
replica's own weights at the start of the round.

    round ends           wait for the entries of the previous round
                         pseudo-gradient = base - w_i
                         w_i <- common - (updates that common does not include)
                         base <- w_i
    in a thread          exchange; update common
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_optimizers._compat.keras_internals import (
    is_overwritten,
    variable_index,
)
from tf_optimizers.base.components import (
    backend_variable,
    components,
    own_component,
)

# For each variable, whether it is exchanged.
Choice: TypeAlias = tuple[bool, ...]


class Rounds:
    """Keeps the weights from the start of a round, and counts its local steps.

    A round is `steps` local steps on each replica, followed by an exchange.
    Without `overlap`, each round starts from the current weights, because a
    callback may have changed them since the previous round. With `overlap`,
    only the first round after a synchronization does.

    Args:
        optimizer: The `SparseLoCo` that owns the variables of this object.
        variables: All variables that the optimizer updates.
        masters: The master weight of each variable, or the variable itself if
            it has no master weight.

    Attributes:
        steps: The number of local steps in a round.
    """

    def __init__(
        self, optimizer: Any, variables: Sequence[Any], masters: Sequence[Any]
    ) -> None:
        self.steps = optimizer.sync_every
        self._step_ahead = optimizer.step_ahead
        self._unsent_updates = optimizer._compressor.unsent_updates
        self._taken = optimizer.add_variable(
            shape=(), initializer="zeros", dtype="int64", name="local_steps"
        )
        add = optimizer.add_variable_from_reference
        self._starts = [
            (variable, add(master, "common_weight"))
            for variable, master in zip(variables, masters, strict=True)
            if not is_overwritten(optimizer, variable)
        ]
        self._indices = [variable_index(optimizer, v) for v, _ in self._starts]
        self._commons = self._bases = [start for _, start in self._starts]
        if optimizer.overlap or self._step_ahead:
            self._bases = [add(each, "base_weight") for each in self._bases]
        # For each variable, 1 if it has changed since all replicas had equal
        # weights, else 0. With `overlap`, that may be several rounds ago. These
        # numbers are not saved: after a restart, all variables count as changed
        # until all replicas have equal weights again.
        self._moved = tf.Variable(
            tf.zeros([len(self._starts)], tf.int64),
            trainable=False,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        # The variables that steps update. A step may assign other trainable
        # weights itself, such as a moving average of the model. Such an
        # assignment is no update to exchange.
        self._stepped: list[tf.Variable] = []
        self._functions: dict[Hashable, Callable] = {}

    @property
    def taken(self) -> int:
        """The number of local steps since all replicas had equal weights."""
        taken = components(self._taken)[0]
        # While a `tf.function` is traced, its new variables have no value.
        if not taken.is_initialized():
            return 0
        # `read_value` would add the variable to any function that is being
        # traced, even another model's. Calls of that function would fail once
        # this optimizer is deleted.
        value = tf.raw_ops.ReadVariableOp(resource=taken.handle, dtype=tf.int64)
        return int(value)

    def left(self) -> tf.Tensor:
        """Return the number of local steps left in the round, int64."""
        return self.steps - tf.convert_to_tensor(self._taken.value) % self.steps

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables, as `tf.Variable`s."""
        return [backend_variable(variable) for variable, _ in self._starts]

    def begin(
        self, weights: Sequence[tf.Variable], stepped: Sequence[tf.Variable]
    ) -> None:
        """Begin a round if all replicas have equal weights; record the step.

        At the beginning of a round, copy the weights, and apply `step_ahead` to
        the variables in `stepped`, because each of these is exchanged when the
        round ends. In every step, record which variables the step changes.

        Args:
            weights: This replica's weights of all variables.
            stepped: The variables that this step updates.
        """

        def keep() -> None:
            for (variable, common), index, base, weight in zip(
                self._starts, self._indices, self._bases, weights, strict=True
            ):
                own_component(common).assign(weight)
                if self._step_ahead and _is_in(stepped, variable):
                    unsent = self._unsent_updates(index)
                    if unsent is not None:
                        weight.assign_sub(self._step_ahead * unsent)
                if base is not common:
                    own_component(base).assign(weight)

        self._stepped += [v for v in stepped if not _is_in(self._stepped, v)]
        taken, moved = map(own_component, (self._taken, self._moved))
        tf.cond(taken == 0, keep, lambda: None)
        steps = [int(_is_in(stepped, each)) for each, _ in self._starts]
        moved.assign(tf.maximum(self._may_have_moved(taken, moved), steps))

    def _may_have_moved(self, taken: tf.Tensor, moved: tf.Tensor) -> tf.Tensor:
        """Return 1 for each variable that may have changed, else 0.

        `moved` is 1 for variables that have changed since all replicas had
        equal weights. After a restart within a round, `moved` is 0, so all
        variables get a 1.
        """
        is_resumed = (taken > 0) & tf.reduce_all(moved == 0)
        return tf.where(is_resumed, tf.ones_like(moved), moved)

    def due(
        self, stepped: Sequence[tf.Variable], is_due: tf.Tensor
    ) -> list[tuple[Choice, tf.Tensor]]:
        """Return sets of variables, and whether to exchange each set now.

        The usual set has the variables in `stepped`, and the trainable
        variables that other steps update. But a step that was traced before a
        variable was frozen, or another step, may have changed other variables.
        If so, all variables are exchanged.

        Args:
            stepped: The variables that the step updates.
            is_due: bool scalar. Whether the step ends its round.
        """
        usual = tuple(
            _is_in(self._stepped if variable.trainable else stepped, variable)
            for variable, _ in self._starts
        )
        if all(usual):
            return [(usual, is_due)]
        moved = own_component(self._moved).read_value()
        more = tf.reduce_any((moved > 0) & ~tf.constant(usual))
        return [(usual, is_due & ~more), ((True,) * len(usual), is_due & more)]

    def chosen(self, choice: Choice) -> list[tf.Variable]:
        """Return the chosen variables, as `tf.Variable`s."""
        return list(itertools.compress(self.variables, choice))

    def indices(self, choice: Choice) -> list[int]:
        """Return the indices of chosen variables in the optimizer."""
        return list(itertools.compress(self._indices, choice))

    def count(self) -> tf.Tensor:
        """Count a local step; return whether the step ends its round."""
        taken = own_component(self._taken)
        taken.assign_add(1)
        # With overlap, `taken` also counts the steps of earlier rounds, so that
        # it is 0 only while all replicas have the same weights.
        return taken % self.steps == 0

    def end(
        self, weights: Sequence[tf.Variable], choice: Choice
    ) -> list[tf.Tensor]:
        """End the round; return this replica's pseudo-gradients.

        A pseudo-gradient is the change of a weight in the round. Afterwards,
        this replica's weights and base weights equal the common weights.
        """
        starts, bases = self.kept(choice)
        pseudo_gradients = self.moved(weights, choice)
        for start, base, weight in zip(starts, bases, weights, strict=True):
            weight.assign(start)
            if base is not start:
                base.assign(start)
        for count in map(own_component, (self._taken, self._moved)):
            count.assign(tf.zeros_like(count))
        return pseudo_gradients

    def moved(
        self, weights: Sequence[tf.Variable], choice: Choice
    ) -> list[tf.Tensor]:
        """Return base weights minus weights: their change in the round.

        A weight that no step has updated in the round, but that a step may have
        assigned, becomes the common weight. So its change is 0.
        """
        known = self._may_have_moved(tf.constant(1), own_component(self._moved))
        starts, bases = self.kept(choice)
        places = itertools.compress(range(len(choice)), choice)
        for i, own, *kept in zip(places, weights, starts, bases, strict=True):
            if not _is_in(self._stepped, self.variables[i]):
                for each in kept:
                    each.assign(tf.where(known[i] > 0, each, own))
        return differences(bases, weights)

    def kept(self, choice: Choice) -> list[list[tf.Variable]]:
        """Return this replica's common and base weights of chosen variables."""
        return [
            list(map(own_component, itertools.compress(each, choice)))
            for each in (self._commons, self._bases)
        ]

    def begin_from_own_weights(
        self,
        weights: Sequence[tf.Variable],
        choice: Choice,
        moved: Sequence[tf.Tensor],
    ) -> None:
        """Begin a round from this replica's own weights.

        First set them to the common weights minus this replica's updates that
        the common weights do not include yet.

        Args:
            weights: This replica's weights of chosen variables.
            choice: The chosen variables.
            moved: The result of `moved`, before this call.
        """
        unsent = map(self._unsent_updates, self.indices(choice))
        ahead = [
            distance if updates is None else updates
            for updates, distance in zip(unsent, moved, strict=True)
        ]
        for weight, common, base, distance in zip(
            weights, *self.kept(choice), ahead, strict=True
        ):
            with tf.device(common.device):
                weight.assign(common - distance)
                base.assign(weight)

    def constrain(self, stepped: Sequence[tf.Variable], choice: Choice) -> None:
        """Apply constraints to chosen variables that are not in `stepped`.

        Keras applies the constraints of `stepped` variables after the step.
        """
        for variable, _ in itertools.compress(self._starts, choice):
            if variable.constraint and not _is_in(stepped, variable):
                own = own_component(variable)
                own.assign(variable.constraint(own))

    def end_early(
        self,
        run: Callable,
        end: Callable[[Choice], None],
        sparse: Hashable,
    ) -> None:
        """Call `end` on every replica, with the variables to exchange.

        These are the trainable variables that steps update, and all variables
        that may have changed since all replicas had equal weights. `end` is
        traced once for each choice and each value of `sparse`, which identifies
        the variables with sparse gradients.
        """
        taken = tf.constant(self.taken, tf.int64)
        moved = self._may_have_moved(
            taken, components(self._moved)[0].read_value()
        )
        choice = tuple(
            bool(has_moved)
            or (variable.trainable and _is_in(self._stepped, variable))
            for (variable, _), has_moved in zip(
                self._starts, moved.numpy(), strict=True
            )
        )
        self.call((sparse, choice), run, functools.partial(end, choice))

    def call(
        self, key: Hashable, run: Callable, function: Callable, *args: tf.Tensor
    ) -> None:
        """Call a function on every replica; trace it once for each key."""
        if key not in self._functions:
            self._functions[key] = tf.function(
                lambda *args: run(function, args), autograph=False
            )
        self._functions[key](*args)


def differences(
    starts: Sequence[tf.Variable], weights: Sequence[tf.Variable]
) -> list[tf.Tensor]:
    """Return start - weight for each weight."""
    moved = []
    for start, weight in zip(starts, weights, strict=True):
        with tf.device(start.device):
            moved.append(start - weight)
    return moved


def _is_in(variables: Sequence[tf.Variable], variable: Any) -> bool:
    return any(each is backend_variable(variable) for each in variables)
