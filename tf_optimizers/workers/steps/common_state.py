"""Averages the state that steps assign without an optimizer.

Layers and steps compute such state from their replica's rows: for example,
moving statistics, cluster centers or codebooks. So replicas have different
values, until all of them get the mean:

    in an epoch              at its end; before `evaluate`, `predict`, `save`
    v_i <- step(v_i, x_i)    v_i <- (v_0 + ... + v_{N-1}) / N

Only variables of floating-point dtype are averaged. Trainable weights must
already be equal on all replicas, except in a round of local steps
(`SparseLoCo`).

A callback may set variables to values that differ between workers. For example,
it may copy moving statistics to a second model. So after any worker has set
variables outside of steps, workers also compare weights that steps do not
assign.
"""

import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_optimizers._compat import Logs, distinct
from tf_optimizers._compat.hooks import check_saving, insert_callback
from tf_optimizers._compat.keras_internals import (
    layers_of,
    path_of,
    states_of,
)
from tf_optimizers._compat.strategies import maker_of
from tf_optimizers.replicas import local_copies, replicas_of
from tf_optimizers.workers.agreement.same_training import (
    digests_of,
    hint_of_code,
    hint_of_steps,
)
from tf_optimizers.workers.agreement.statements import (
    check_equal,
    gather_statements,
    raise_together,
)
from tf_optimizers.workers.steps.adapters import check_adapters
from tf_optimizers.workers.steps.reached_variables import reached_variables
from tf_optimizers.workers.steps.round_logs import reduce_in_next_step
from tf_optimizers.workers.worker_replicas import is_ours
from tf_optimizers.wrapped import has_common_weights, local_steppers

_HINT = (
    "Save, evaluate and predict on every worker: these calls average, over all "
    "replicas, the variables that steps assign, such as moving statistics."
)


@functools.cache
def watch_state() -> None:
    """Permanently make Keras use `AverageState`, and average before saves."""
    insert_callback(
        AverageState, lambda model: _state_of_model(model) is not None
    )
    check_saving(_make_common_to_save)


class AverageState(keras.callbacks.Callback):
    """Averages state when an epoch ends, and before `evaluate` or `predict`."""

    def on_train_begin(self, logs: Logs = None) -> None:
        """Raise if `enable_lora` was called after an optimizer was built."""
        check_adapters(self.model)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Make the first step of an epoch reduce logs."""
        reduce_in_next_step(self.model)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average state over replicas before other callbacks save the model."""
        self._make_common("the end of an epoch")

    def on_test_begin(self, logs: Logs = None) -> None:
        """Average state over replicas before an evaluation or a validation."""
        self._make_common("an evaluation")

    def on_test_end(self, logs: Logs = None) -> None:
        """Record that variables assigned only in training are unchanged."""
        self._keep()

    def on_predict_begin(self, logs: Logs = None) -> None:
        """Average state over replicas before a prediction."""
        self._make_common("a prediction")

    def on_predict_end(self, logs: Logs = None) -> None:
        """Record that variables assigned only in training are unchanged."""
        self._keep()

    def _make_common(self, subject: str) -> None:
        # Synchronize here, too: within a round, trainable weights would not be
        # compared. `CommonWeights` may come after this callback, or be missing
        # if the model has no `SparseLoCo` until its first step builds one.
        for optimizer in local_steppers(self.model):
            optimizer.synchronize()
        strategy = self.model.distribute_strategy
        strategy.common_state.make_common(self.model, subject, is_by_all=True)

    def _keep(self) -> None:
        self.model.distribute_strategy.common_state.keep_common(self.model)


def _make_common_to_save(model: keras.Model) -> None:
    state = _state_of_model(model)
    # Workers cannot exchange values while a function is traced.
    if state is not None and tf.executing_eagerly():
        state.make_common(model, "a save of the model")


class _Assigned(NamedTuple):
    """A variable that steps assign.

    Attributes:
        variable: A weak reference to the variable.
        only_in_training: Whether only training steps assign the variable.
        models: The models whose steps assign the variable.
    """

    variable: weakref.ref[Any]
    only_in_training: bool
    models: weakref.WeakSet[keras.Model]


class CommonState:
    """Tracks the variables that steps assign, and averages them over replicas.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._assigned: dict[int, _Assigned] = {}
        # For each variable, by id: the result of `_progress` when its values
        # were last compared, or last recorded as unchanged.
        self._common_at: dict[int, Any] = {}
        self._warned: set[int] = set()
        # Whether this worker has set variables since the last call to
        # `take_set`.
        self._has_set = False
        # How often `adopt_set` has found that a worker had set variables, and
        # whether all workers had done so the last time.
        self._times_set, self._is_set_by_all = 0, True
        # For each model: `_times_set` when workers last compared its weights.
        self._compared_at: weakref.WeakKeyDictionary[keras.Model, int] = (
            weakref.WeakKeyDictionary()
        )
        # For each model: its `tf.Variable`s, until `note_run` is called.
        self._reached: weakref.WeakKeyDictionary[
            keras.Model, list[tf.Variable]
        ] = weakref.WeakKeyDictionary()

    def note_run(self) -> None:
        """Search for `tf.Variable`s again before the next comparison.

        Call this method when `strategy.run` calls or traces a function: only
        then can replicas begin to assign a variable. A search may take a second
        if a model has many objects.
        """
        self._reached.clear()

    def note_set(self) -> None:
        """Record that this worker has set a variable outside of steps."""
        self._has_set = True

    def take_set(self) -> bool:
        """Return whether this worker has set variables since the last call."""
        has_set, self._has_set = self._has_set, False
        return has_set

    def adopt_set(self, has_set: Sequence[bool]) -> None:
        """Make workers compare weights again if any worker has set variables.

        Args:
            has_set: The result of `take_set` on each worker.
        """
        if any(has_set):
            self._times_set += 1
            self._is_set_by_all = all(has_set)

    def note(
        self,
        variable: keras.Variable,
        model: keras.Model | None,
        is_training: bool,
    ) -> None:
        """Record that the current step assigns a value to a variable.

        `model` is the model of the step, or None.
        """
        # With "sum" or "mean", TensorFlow itself reduces the value over
        # replicas. With "only_first_replica", it copies the first replica's
        # value, but only within a worker.
        if variable.aggregation not in ("none", "only_first_replica"):
            return
        models = weakref.WeakSet([] if model is None else [model])
        if self.is_assigned(variable):
            known = self._assigned[id(variable)]
            is_training &= known.only_in_training
            models |= known.models
        self._assigned[id(variable)] = _Assigned(
            weakref.ref(variable), is_training, models
        )

    def is_assigned(self, variable: Any) -> bool:
        """Return whether `note` has recorded an assignment to a variable."""
        known = self._assigned.get(id(variable))
        return known is not None and known.variable() is variable

    def make_common(
        self, model: keras.Model, subject: str, is_by_all: bool = False
    ) -> None:
        """Set a model's state to the mean over all replicas.

        Every worker must call this method, with one exception. If the state has
        been compared, and no step or collective has run since, a call without
        `is_by_all` exchanges nothing. A single worker may make such a call.
        So if one worker's callback sets a variable after the last comparison, a
        save does not find the difference.

        Args:
            model: The model.
            subject: The purpose, for errors, such as "a prediction".
            is_by_all: Whether all workers are known to call this method. If so,
                workers also compare the weights that steps do not assign,
                unless no worker has set variables since the last such
                comparison; see `adopt_set`. Defaults to `False`.

        Raises:
            RuntimeError: If only some workers call this method; if steps have
                assigned different values to a trainable weight on different
                replicas; if workers have set a weight to different values that
                must not be averaged; or if steps assign different numbers of
                variables on different workers.
        """
        now = self._progress()
        variables = [
            variable
            for variable in self._variables_of(model)
            if self._common_at.get(id(variable)) != now
        ]
        if is_by_all and self._compared_at.get(model, 0) < self._times_set:
            self._compared_at[model] = self._times_set
            variables = distinct([*variables, *self._settable(model)])
        if not variables:
            return
        differing = _differing(self._strategy, variables, subject)
        self._check_set(model, differing, subject)
        numbers = [v for v in differing if tf.as_dtype(v.dtype).is_floating]
        with self._strategy.scope():
            replicas_of(self._strategy).average(numbers)
        self._warn(
            [v for v in differing if not tf.as_dtype(v.dtype).is_floating]
        )
        self._note_common(variables)

    def keep_common(self, model: keras.Model) -> None:
        """Record that variables assigned only in training are unchanged.

        Call this method after steps that do not train.
        """
        self._note_common(
            [
                variable
                for variable in self._variables_of(model)
                if self.is_assigned(variable)
                and self._assigned[id(variable)].only_in_training
            ]
        )

    def _note_common(self, variables: Sequence[Any]) -> None:
        now = self._progress()
        self._common_at |= {id(variable): now for variable in variables}

    def _progress(self) -> Any:
        """Return a value that changes when a step or a collective runs."""
        extended = self._strategy.extended
        # With one worker, steps are not counted, so return a new object, which
        # differs from all earlier ones. Then replicas are always compared,
        # which is cheap on one worker.
        return extended.channel.progress() if extended.workers > 1 else object()

    def _variables_of(self, model: keras.Model) -> list[Any]:
        """Return variables of the model that steps assign or may assign.

        These are weights of the model that any step assigns, other Keras
        variables that the model's steps assign, such as those of a loss, and
        the result of `_variables_of_tensorflow`.
        """
        known = {id(weight) for weight in model.weights}
        known |= _states_of_rows(model)
        found = [v for v in self._settable(model) if self.is_assigned(v)]
        found += [v for v in self._assigned_by(model) if id(v) not in known]
        if model not in self._reached:
            self._reached[model] = _variables_of_tensorflow(model)
        found += self._reached[model]
        # A variable created outside of the scope has only one copy.
        copies = len(replicas_of(self._strategy).devices)
        return [
            variable
            for variable in found
            if len(local_copies(self._strategy, variable)) == copies
        ]

    def _assigned_by(self, model: keras.Model) -> list[keras.Variable]:
        """Return the variables that the model's steps assign."""
        found = [
            each.variable()
            for each in self._assigned.values()
            if model in each.models
        ]
        return [variable for variable in found if variable is not None]

    def _settable(self, model: keras.Model) -> list[Any]:
        """Return the model's weights that all replicas should have in common.

        These are all weights except the states of stateful recurrent layers
        and, within a round of local steps, trainable weights.
        """
        of_rows, is_common = _states_of_rows(model), has_common_weights(model)
        return [
            variable
            for variable in model.weights
            if (is_common or not variable.trainable)
            and id(variable) not in of_rows
        ]

    def _check_set(
        self, model: keras.Model, differing: Sequence[Any], subject: str
    ) -> None:
        """Raise unless all variables that differ may be averaged.

        Only these variables may be averaged:

        - variables that steps assign, except trainable weights of the model;
        - other variables created with `trainable=False`, unless only some
          workers have set variables outside of steps;
        - `tf.Variable`s.
        """
        trainable = {id(weight) for weight in model.trainable_weights}
        assigned = [
            variable
            for variable in differing
            if self.is_assigned(variable) and id(variable) in trainable
        ]
        if assigned:
            raise_together(
                f"All replicas must have the same weights before {subject}. "
                f"Received: different values. {hint_of_steps(assigned)}"
            )
        common = [v for v in differing if isinstance(v, tf.Variable)]
        if self._is_set_by_all:
            common += states_of(model)
        wrong = [
            f"`{path_of(variable)}`"
            for variable in differing
            if not self.is_assigned(variable)
            and not any(variable is each for each in common)
        ]
        if wrong:
            raise_together(
                f"All workers must agree on the weights before {subject}. "
                f"Received: different values of {', '.join(wrong)}. "
                f"{hint_of_code('weights')}"
            )

    def _warn(self, variables: Sequence[Any]) -> None:
        """Warn on the first worker about variables that cannot be averaged.

        Each variable is named in only one warning.
        """
        new = [v for v in variables if id(v) not in self._warned]
        self._warned |= {id(variable) for variable in new}
        if new and self._strategy.extended.worker_index == 0:
            shown = ", ".join(
                f"`{path_of(v)}` of dtype {tf.as_dtype(v.dtype).name}"
                for v in new
            )
            warnings.warn(
                "Variables to which replicas assign different values must be "
                "floating-point, so that they can be averaged. Otherwise each "
                f"worker saves its own value. Received: {shown}. "
                "Use float32, or assign a value that is the same on all "
                "replicas, such as `tf.distribute.get_replica_context()."
                "all_reduce('SUM', value)`.",
                stacklevel=2,
            )


def _state_of_model(model: keras.Model) -> CommonState | None:
    """Return the `CommonState` of a model's strategy.

    Return None if the strategy is not ours, or has only one replica.
    """
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1 or not is_ours(strategy):
        return None
    return strategy.common_state


def note_assigned(
    variable: keras.Variable, model: keras.Model | None, is_training: bool
) -> None:
    """Record that a step assigns a variable, if our strategy runs the step.

    Outside of steps, record that this worker sets a variable of our strategy,
    unless the variable is a scalar, such as a learning rate.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        strategy = maker_of([variable])
        if strategy is not None and is_ours(strategy) and len(variable.shape):
            strategy.common_state.note_set()
        return
    if is_ours(context.strategy):
        state = context.strategy.common_state
        state.note(variable, model, is_training)


def _states_of_rows(model: keras.Model) -> set[int]:
    """Return the ids of the states of stateful recurrent layers.

    Such a state has separate values for each of the replica's rows, so it must
    not be averaged. The replica uses these values again for the rows at the
    same positions of the next batch.
    """
    return {
        id(state)
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.RNN) and layer.stateful
        for state in keras.tree.flatten(layer.states or [])
    }


def _variables_of_tensorflow(model: keras.Model) -> list[tf.Variable]:
    """Return a model's `tf.Variable`s that may differ between replicas.

    The result omits string variables, `on_read` variables, and variables that
    TensorFlow itself reduces in each assignment; see `CommonState.note`.
    """
    kinds = tf.VariableAggregation
    return [
        each
        for each in reached_variables(model)
        if each.aggregation in (kinds.NONE, kinds.ONLY_FIRST_REPLICA)
        and each.synchronization != tf.VariableSynchronization.ON_READ
        and each.dtype != tf.string
    ]


def _differing(
    strategy: Any, variables: Sequence[Any], subject: str
) -> list[Any]:
    """Return the variables whose values differ between replicas.

    Raises:
        RuntimeError: If only some workers call this function, or if they pass
            different numbers of variables.
    """
    own = [digests_of(strategy, variable) for variable in variables]
    received = gather_statements(strategy, subject, own, _HINT)
    counts = [{"variables that steps assign": len(each)} for each in received]
    check_equal(subject, counts)
    return [
        variable
        for variable, *each in zip(variables, *received, strict=True)
        if len({digest for found in each for digest in found}) > 1
    ]
