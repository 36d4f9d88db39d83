"""Runs steps of Keras models, and reduces their outputs over replicas.

The kind of an output decides the common result of all replicas:

    number or bool              the mean, weighted by the replicas' rows
    array of fixed shape        the mean, weighted by the replicas' rows
    array, elements per row     the concatenated arrays
    result of a metric          the result for the rows of all replicas
    predictions                 the concatenated rows, without padding

Arrays in this table contain numbers or bools. A mean of integers or bools is a
float. If a metric has large variables, or variables that are not sums, its
results count as numbers or arrays. Other outputs, such as strings, are left to
Keras.
"""

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers._compat import distinct
from tf_optimizers._compat.strategies import replaced
from tf_optimizers._compat.tensorflow_internals import convert
from tf_optimizers.replicas import replicas_of
from tf_optimizers.workers._compat.step_functions import ModelStep, step_of
from tf_optimizers.workers.data import local_rounds
from tf_optimizers.workers.data.batch_metadata import RowCounts, rows_of
from tf_optimizers.workers.data.data_distribution import (
    as_tensor,
    batch_of_arrays,
    report_failure,
    split_arrays,
)
from tf_optimizers.workers.steps.array_lengths import (
    gains_a_row,
    lengths_of,
    may_be_of_rows,
    of_rows_by_length,
)
from tf_optimizers.workers.steps.metric_results import (
    Result,
    names_of,
    noted_methods,
    results_among,
)
from tf_optimizers.workers.steps.metric_variables import (
    metrics_of,
    warn_if_made_of,
)
from tf_optimizers.workers.steps.noted_exchanges import note_exchange
from tf_optimizers.workers.steps.replica_state import replica
from tf_optimizers.workers.steps.restored_weights import RestoredWeights
from tf_optimizers.workers.steps.round_logs import sum_in_rounds
from tf_optimizers.workers.steps.run_outputs import copied, gather_rows
from tf_optimizers.workers.steps.share import (
    all_or_no_rows,
    as_in_one_process,
    check_vectors,
    make_row_variables,
    rows_of_inputs,
    share_of,
    trace_with_rows,
    with_checked_rows,
)
from tf_optimizers.workers.steps.uneven_batches import weighted_losses

_as_it_is = tf.autograph.experimental.do_not_convert


class Steps:
    """Finds steps of Keras models among the functions passed to `strategy.run`.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
        watch: Called with each model that is trained or evaluated.
    """

    def __init__(self, strategy: Any, watch: Callable) -> None:
        self._strategy, self._watch = strategy, watch
        self._row_variables: list[tf.Variable] = []
        self._is_of_arrays = False  # Whether the current step got arrays.
        # For each model, two dicts to pass to `split_arrays` as `seen`: one for
        # training and evaluation, and one for prediction.
        self._seen: weakref.WeakKeyDictionary[keras.Model, Any] = (
            weakref.WeakKeyDictionary()
        )

    @contextlib.contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Report to other workers if a step on arrays cannot be traced here.

        A wrong shape, for example, may occur on this worker only. Without a
        report, the other workers would wait for this worker's note on the
        batch.
        """
        self._is_of_arrays = False
        try:
            yield
        except Exception:
            if self._is_of_arrays and not tf.executing_eagerly():
                report_failure(self._strategy)
            raise

    def of(
        self, function: Callable, args: Any, kwargs: Any
    ) -> tuple["Step | None", Any]:
        """Return the step to run in place of a function, and its arguments.

        The step is None if the function is not the step of a model, if it gets
        anything but one positional argument, or if there is only one replica.
        Otherwise, a batch of plain arrays is split among replicas.
        """
        found = step_of(function)
        is_alone = self._strategy.num_replicas_in_sync == 1
        if not found or is_alone or kwargs or len(args) != 1:
            return None, args
        if not self._row_variables:
            devices = self._strategy.extended.worker_devices
            self._row_variables = make_row_variables(len(devices))
        model, step, kind = found
        is_predicting = kind == "predict_step"
        seen = self._seen.setdefault(model, ({}, {}))[is_predicting]
        shared, batch = args, batch_of_arrays(args)
        if batch is not None:
            self._is_of_arrays = True
            shared = (split_arrays(self._strategy, batch, seen),)
        known = rows_of(shared), self._row_variables
        extended = self._strategy.extended
        add = functools.partial(extended.reduce_in_parallel, "SUM")
        if is_predicting:
            return Step(step, kind, None, *known, add), shared
        self._watch(model)
        # `train_on_batch` passes arrays, and must return the logs of this step.
        is_fit = isinstance(function, ModelStep) and shared is args
        if is_fit and extended.workers > 1:
            if tf.executing_eagerly():
                note_exchange()  # Each step reduces its logs.
            elif current := local_rounds.round_of_fit():
                add = functools.partial(
                    sum_in_rounds, self._strategy, model, current
                )
        return Step(step, kind, model, *known, add), shared


class Step:
    """A model's step in one call to `strategy.run`.

    Args:
        function: Called with a replica's part of a batch.
        kind: "train_step", "test_step" or "predict_step".
        model: The model; None for predictions.
        rows: The batch's numbers of rows, or None if unknown.
        row_variables: For each of this worker's replicas, the variable of its
            `Share`.
        add: Sums a per-replica vector over replicas.
    """

    def __init__(
        self,
        function: Callable,
        kind: str,
        model: keras.Model | None,
        rows: RowCounts | None,
        row_variables: Sequence[tf.Variable],
        add: Callable[[Any], Any],
    ) -> None:
        method = getattr(function, "__func__", None)
        self._is_keras = method is keras.Model.train_step
        self._kind, self._is_predicting = kind, kind == "predict_step"
        # AutoGraph converts only the user's function.
        self._function = convert(function)
        self._model, self._rows = model, rows
        self._row_variables, self._add = row_variables, add
        self._undo = contextlib.ExitStack()
        self._waits = local_rounds.waits_of_fit()
        # The `Result` of each output that is a metric's result, by index.
        self._found: dict[int, Result] = {}
        self._numbers: list[int] = []  # The indices of numbers and bools.
        # For each other output that is an array, by index: its name and shape.
        self._arrays: dict[int, tuple[Any, tf.TensorShape]] = {}
        self._fixed_rows: int | None = None
        # For each value that a loss sums: its shape, and whether it counts as
        # having an element for each row.
        self._vectors: list[tuple[tf.TensorShape, bool]] = []

    @_as_it_is
    def __call__(self, batch: Any) -> tuple[Any, list[Any], Any, list[Any]]:
        """Run the step on a replica.

        Returns:
            The outputs of the step; the values in `_states`, to be summed over
            replicas; the replica's share of the rows; and the result of
            `lengths_of` for the arrays.
        """
        share = share_of(batch, self._rows, self._row_variables)
        batch = as_in_one_process(batch, self._rows)
        rows = rows_of_inputs(batch)
        results: list[Any] = []
        updated: dict[int, keras.Variable] = {}
        vectors: list[tuple[tf.TensorShape, bool]] = []
        with replica.set(
            share=share,
            model=self._model,
            rows=rows,
            results=results,
            updated=updated,
            vectors=vectors,
            note_metric=self._note,
            is_training=self._kind == "train_step",
            weights=RestoredWeights(),
            scaled=set(),
            waits=self._waits,
        ):
            returned = self._function(batch)
        self._fixed_rows = rows if isinstance(rows, int) else None
        self._vectors = vectors
        outputs = list(map(as_tensor, tf.nest.flatten(returned)))
        names = names_of(returned, outputs)
        found = results_among(outputs, names, results)
        others = self._note_kinds(outputs, names, found)
        own = [(names[i], outputs[i]) for i in others if i not in found]
        warn_if_made_of(updated.values(), own)
        if self._is_predicting and rows is not None:
            outputs = [
                with_checked_rows(name, output, rows)
                for name, output in zip(names, outputs, strict=True)
            ]
        weight = share.weight
        as_returned = _rows_only if self._is_predicting else _scaled_for_mean
        for i in others:
            outputs[i] = as_returned(weight, outputs[i])
        self._numbers = [
            i for i in others if self._is_numeric(outputs[i], is_array=False)
        ]
        packed = tf.nest.pack_sequence_as(returned, outputs)
        lengths = lengths_of(rows, self._arrays.values())
        return packed, sum(self._states(), []), weight, lengths

    def _note_kinds(
        self,
        outputs: Sequence[Any],
        names: Sequence[Any],
        found: dict[int, Result],
    ) -> list[int]:
        """Record which outputs are results of metrics, and which are arrays.

        A metric's result counts as such only if it may be computed again from
        the metric's variables. `found` is the result of `results_among`.

        Returns:
            The indices of the outputs that are not results of metrics.
        """
        self._found = {
            i: each for i, each in found.items() if each.metric is not None
        }
        others = sorted(set(range(len(outputs))) - set(self._found))
        self._arrays = {
            i: (names[i], outputs[i].shape)
            for i in others
            if self._is_numeric(outputs[i], is_array=True)
        }
        return others

    def _is_numeric(self, value: Any, is_array: bool) -> bool:
        """Return whether an output is a number or, if `is_array`, an array.

        Bools count as numbers. Predictions do not count.
        """
        return (
            not self._is_predicting
            and isinstance(value, tf.Tensor)
            and value.shape.rank is not None
            and bool(value.shape.rank) == is_array
            and _as_float(value).dtype.is_floating
        )

    @contextlib.contextmanager
    def noting_results(self) -> Iterator[None]:
        """In this context, record which tensors are results of metrics.

        Also weight the step's losses; see `weighted_losses`.
        """
        with self._undo:
            if self._model is not None:
                losses = weighted_losses(self._model, self._is_keras)
                self._undo.enter_context(replaced(losses))
                for metric in metrics_of(self._model):
                    self._note(metric)
            yield

    def _note(self, metric: keras.metrics.Metric) -> None:
        """Replace methods of a metric until the step ends."""
        if "result" not in vars(metric):
            self._undo.enter_context(replaced(noted_methods(metric)))

    def arrays_of_rows(
        self, run: Callable[["Step", Any], Any], args: Any
    ) -> set[int]:
        """Return the indices of outputs that have elements for each row.

        In eager mode, return an empty set, since `finish` finds these outputs.

        In a graph with an unknown number of rows, these are the arrays of
        unknown length. If the number is known, an array may be one of them if
        its length is a multiple of the number. But for two rows, a step may
        also return the means of two columns. So this method traces the step
        with one more row, without running it, and compares the lengths. It does
        the same for vectors that losses sum.

        Args:
            run: Runs a step on all replicas.
            args: The arguments of this step, with every local replica's part.

        Raises:
            ValueError: See `gains_a_row` and `check_vectors`.
        """
        rows, of_rows = self._fixed_rows, set()
        in_graph = {} if tf.executing_eagerly() else self._arrays
        as_long = {i for i in in_graph if may_be_of_rows(in_graph[i][1], rows)}
        is_open = as_long or any(of_rows for _, of_rows in self._vectors)
        if not is_open or rows is None:
            return as_long
        other, problem = copy.copy(self), None
        try:
            trace_with_rows(functools.partial(other._run_by, run), args, rows)
        except Exception as error:  # The user's code may raise any error.
            problem = error
        if problem is None:
            check_vectors(self._kind, rows, self._vectors, other._vectors)
        for i in as_long:
            found = None if problem else other._arrays.get(i)
            if gains_a_row(self._kind, rows, *self._arrays[i], found, problem):
                of_rows.add(i)
        return of_rows

    def _run_by(self, run: Callable[["Step", Any], Any], args: Any) -> Any:
        self._rows = rows_of(args)
        return run(self, args)

    @_as_it_is
    def finish(
        self, strategy: Any, outputs: Any, of_rows: set[int]
    ) -> tuple[Any, list[Any]]:
        """Combine the replicas' numbers, arrays and metric results.

        Args:
            strategy: The strategy. Call this method in cross-replica context.
            outputs: The results of `__call__`, as per-replica values.
            of_rows: The result of `arrays_of_rows`.

        Returns:
            All outputs of the step, and a list of those that are combined.
        """
        returned, state, weight, lengths = outputs
        if lengths:
            of_rows = of_rows_by_length(strategy, lengths[0], self._arrays)
        means = [
            i
            for i, (_, shape) in self._arrays.items()
            if i not in of_rows and shape.is_fully_defined()
        ]
        if not (self._found or self._numbers or means or of_rows):
            return returned, []
        flat = tf.nest.flatten(returned)
        group = replicas_of(strategy)
        numbers = [flat[i] for i in self._numbers]
        weighted = [group.run(_times, (weight, flat[i])) for i in means]
        sums = iter(
            group.reduce_together([*state, *numbers, *weighted], self._add)
        )
        totals = {id(own): [next(sums) for _ in own] for own in self._states()}
        of_all = {i: next(sums) / group.count for i in self._numbers}
        of_all |= {i: next(sums) for i in means}
        for i in of_rows:
            own = group.run(_rows_only, (weight, flat[i]))
            of_all[i] = gather_rows(strategy, own)
        for i, (metric, place, own) in self._found.items():
            total = totals[id(own)]
            result = keras.tree.flatten(metric.stateless_result(total))[place]
            # If the result is one of the metric's variables, use its sum.
            values = dict(zip(map(id, metric.variables), total, strict=True))
            of_all[i] = values.get(id(result), result)
        for i, value in of_all.items():
            flat[i] = group.run(copied, (value,))
        identical = [flat[i] for i in of_all]
        return tf.nest.pack_sequence_as(returned, flat), identical

    def _states(self) -> list[list[tf.Tensor]]:
        """Return the distinct states of the metric results among outputs."""
        return distinct(found.state for found in self._found.values())


def _scaled_for_mean(weight: tf.Tensor, value: Any) -> Any:
    """Scale a number so that the mean over replicas is weighted by rows.

    If reads of a variable are sums over replicas, the variable is multiplied by
    the number of replicas, so that the mean is the sum. Variables that are not
    `on_read`, and values that are not numbers, are not scaled.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if isinstance(value, (keras.Variable, tf.Variable)):
        how = getattr(value.aggregation, "name", value.aggregation)
        read = ("on_read", tf.VariableSynchronization.ON_READ)
        is_own = value.synchronization in read
        value = tf.convert_to_tensor(value)
        if not is_own:
            return _as_float(value)
        if how.lower() == "sum":
            return value * tf.cast(replicas, value.dtype)
    if isinstance(value, (bool, int, float, np.generic)):
        value = tf.constant(value)
    if not tf.is_tensor(value):
        return value
    if value.dtype == tf.bool:  # Keras logs a bool as 0 or 1.
        value = tf.cast(value, tf.float32)
    is_number = value.shape.rank == 0 and _as_float(value).dtype.is_floating
    return _times(weight * replicas, value) if is_number else value


def _times(weight: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Return a value times a weight; 0 if the weight is 0, even for NaN."""
    value = _as_float(value)
    return tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype))


def _as_float(value: tf.Tensor) -> tf.Tensor:
    """Return integers and bools as floats, so that means are not rounded."""
    if value.dtype.is_integer or value.dtype == tf.bool:
        # A float32 cannot represent every integer above 2^24.
        return tf.cast(value, tf.float64)
    return value


def _rows_only(weight: tf.Tensor, value: Any) -> Any:
    return all_or_no_rows(value, weight > 0)
