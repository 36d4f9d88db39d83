"""Runs steps of Keras models, and reduces their outputs.

output          result of a replica
number          weighted by the replica's rows; Keras takes the mean
array           weighted in the same way, or joined if it has an element for
                each row, whatever the number of rows
metric          the result over the rows of all replicas
predictions     without the prediction of a padding row
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

from tf_optimizers._compat.tensorflow_internals import convert
from tf_optimizers.replicas import reduce_together
from tf_optimizers.workers._compat.batches import ModelStep, step_of
from tf_optimizers.workers.data.batch_metadata import Rows, rows_of
from tf_optimizers.workers.data.data_distribution import split_arguments
from tf_optimizers.workers.data.local_rounds import round_of_fit
from tf_optimizers.workers.steps.metric_results import (
    is_number_of,
    names_of,
    noted_result,
)
from tf_optimizers.workers.steps.metric_variables import (
    metrics_of,
    warn_if_made_of,
)
from tf_optimizers.workers.steps.replica_state import replica
from tf_optimizers.workers.steps.restored_weights import RestoredWeights
from tf_optimizers.workers.steps.round_logs import Reduction
from tf_optimizers.workers.steps.share import (
    Share,
    all_or_no_rows,
    count_rows,
    empty_without_rows,
    make_kept,
    share_of,
    trace_with_rows,
)

_as_it_is = tf.autograph.experimental.do_not_convert


class Steps:
    """The steps of Keras models that a strategy runs.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
        watch: Called with each model that is trained or evaluated.
    """

    def __init__(self, strategy: Any, watch: Callable) -> None:
        self._strategy, self._watch = strategy, watch
        self._kept: list[tf.Variable] = []
        # The `seen` of `split_arguments`, for training and for prediction.
        self._seen: weakref.WeakKeyDictionary[keras.Model, Any] = (
            weakref.WeakKeyDictionary()
        )

    def of(
        self, function: Callable, args: Any, kwargs: Any
    ) -> tuple["Step | None", Any]:
        """Return the step to run in place of a function, and its arguments.

        The step is None if the function is not the step of a model. Otherwise
        the arguments are split among replicas, unless they already are.
        """
        found = step_of(function)
        if not found or self._strategy.num_replicas_in_sync == 1:
            return None, args
        if kwargs or len(args) != 1:
            return None, args
        if not self._kept:
            devices = self._strategy.extended.worker_devices
            self._kept = make_kept(len(devices))
        model, step, kind = found
        is_predicting = kind == "predict_step"
        seen = self._seen.setdefault(model, ({}, {}))[is_predicting]
        shared = split_arguments(self._strategy, args, seen)
        known = rows_of(shared), self._kept
        reduction = Reduction(self._strategy)
        if is_predicting:
            return Step(
                step, kind, _without_padding, [], *known, reduction
            ), shared
        self._watch(model)
        # `train_on_batch`, which passes arrays, returns the logs of its step.
        is_fit = isinstance(function, ModelStep) and shared is args
        if is_fit and not tf.executing_eagerly() and self._has_others():
            reduction = Reduction(self._strategy, model, round_of_fit())
        metrics = metrics_of(model)
        return Step(step, kind, _weigh, metrics, *known, reduction), shared

    def _has_others(self) -> bool:
        """Return whether there are other workers."""
        return self._strategy.extended.workers > 1


class Step:
    """One run of a step of a model.

    Args:
        function: Called with a replica's part of a batch.
        kind: See `step_of`.
        as_returned: Called with the replica's share, and with each output that
            is not the result of a metric. Returns the replica's result.
        metrics: The metrics of the model.
        rows: The rows of all replicas, or None if they are unknown.
        kept: See `share_of`.
        reduction: Reduces the results of replicas.
    """

    def __init__(
        self,
        function: Callable,
        kind: str,
        as_returned: Callable[[Share, Any], Any],
        metrics: Sequence[keras.metrics.Metric],
        rows: Rows | None,
        kept: Sequence[tf.Variable],
        reduction: Reduction,
    ) -> None:
        method = getattr(function, "__func__", None)
        self._is_keras = method is keras.Model.train_step
        self._kind = kind
        # AutoGraph converts only the user's function.
        self._function, self._as_returned = convert(function), as_returned
        self._metrics, self._rows, self._kept = metrics, rows, kept
        self.reduction = reduction
        self._undo = contextlib.ExitStack()
        self._found: dict[int, tuple[Any, int]] = {}
        self._means: list[int] = []
        self._joined: set[int] = set()
        # If the number of rows is fixed, an array of the same length is unsure:
        # its elements may or may not be those of the rows.
        self._fixed_rows: int | None = None
        self._arrays: dict[int, tuple[Any, tf.TensorShape]] = {}
        self._unsure: set[int] = set()

    @_as_it_is
    def __call__(self, batch: Any) -> tuple[Any, list[tf.Tensor], tf.Tensor]:
        """Run a replica's step.

        Returns:
            Its outputs; tensors to sum over replicas, namely variables of
            metrics and weighted arrays; and the weight of the replica.
        """
        share = share_of(batch, self._rows, self._kept)
        batch = empty_without_rows(batch, self._rows)
        results: list[Any] = []
        updated: dict[int, keras.Variable] = {}
        with replica.set(
            share=share,
            results=results,
            updated=updated,
            note_metric=self._note,
            is_keras=self._is_keras,
            is_training=self._kind == "train_step",
            weights=RestoredWeights(),
            scaled=set(),
        ):
            returned = self._function(batch)
        outputs = tf.nest.flatten(returned)
        names = names_of(returned, outputs)
        found = {
            i: (metric, place)
            for i, (name, output) in enumerate(zip(names, outputs, strict=True))
            for noted, tensor, metric, place in results
            if output is tensor or is_number_of(output, name, tensor, noted)
        }
        self._found = {
            i: each for i, each in found.items() if each[0] is not None
        }
        others = sorted(set(range(len(outputs))) - set(self._found))
        warn_if_made_of(
            updated.values(),
            [(names[i], outputs[i]) for i in others if i not in found],
        )
        rows = count_rows(batch)
        self._fixed_rows = rows = rows if isinstance(rows, int) else None
        arrays = self._arrays = {
            i: (names[i], outputs[i].shape)
            for i in others
            if self._is_array(outputs[i])
        }
        as_long = {i for i, (_, shape) in arrays.items() if shape[0] == rows}
        self._joined, self._unsure = (
            (as_long, set()) if rows is None else (set(), as_long)
        )
        self._means = [
            i
            for i, (_, shape) in arrays.items()
            if i not in as_long and shape.is_fully_defined()
        ]
        state = [
            *map(tf.convert_to_tensor, self._variables()),
            *(_times(share.weight, outputs[i]) for i in self._means),
        ]
        for i in others:
            is_of_rows = i in self._joined
            as_returned = _without_padding if is_of_rows else self._as_returned
            outputs[i] = as_returned(share, outputs[i])
        packed = tf.nest.pack_sequence_as(returned, outputs)
        return packed, state, share.weight

    def _is_array(self, value: Any) -> bool:
        """Return whether an output, not of a prediction, is a float array."""
        return (
            self._as_returned is _weigh
            and tf.is_symbolic_tensor(value)
            and bool(value.shape.rank)
            and value.dtype.is_floating
        )

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record, in this context, which tensors are results of metrics."""
        with self._undo:
            for metric in self._metrics:
                self._note(metric)
            yield

    def _note(self, metric: keras.metrics.Metric) -> None:
        """Record the results of a metric until the step ends."""
        if "result" in vars(metric):
            return
        result = noted_result(metric, metric.result)
        # `setattr` would have Keras track the function.
        self._undo.callback(vars(metric).pop, "result")
        vars(metric)["result"] = result

    def resolve_unsure(
        self, run: Callable[["Step", Any], Any], args: Any
    ) -> None:
        """Find out which unsure arrays have an element for each row.

        An array of two elements, from a replica with two rows, may hold the
        means of two columns. So this traces the step with one more row, and
        does not run it.

        Args:
            run: Runs a step on all replicas.
            args: The arguments of this step, with every replica's part.

        Raises:
            ValueError: If an array still is unsure.
        """
        rows = self._fixed_rows
        if not self._unsure or rows is None:
            return
        other = copy.copy(self)
        problem = None
        try:
            trace_with_rows(functools.partial(other._run_by, run), args, rows)
        except Exception as error:  # The user's code may raise anything.
            problem = error
        for i in self._unsure:
            name, shape = self._arrays[i]
            found = None if problem else other._arrays.get(i, (name, None))[1]
            length = found[0] if found is not None else None
            if length not in (rows, rows + 1):
                raise ValueError(
                    f"An array that `{self._kind}` returns must have an "
                    "element for each row, or the same length for any number "
                    f"of rows. Received: `{name or 'an array'}`, shape {shape} "
                    f"where a replica has {rows} rows, and "
                    f"{problem or f'the shape {found}'} where it has "
                    f"{rows + 1}. Return a number, or a result of a metric; or "
                    "use global batches of another size."
                ) from problem
            if length == rows + 1:
                self._joined.add(i)

    def _run_by(self, run: Callable[["Step", Any], Any], args: Any) -> Any:
        self._rows = rows_of(args)
        return run(self, args)

    @_as_it_is
    def finish(self, strategy: Any, outputs: Any) -> tuple[Any, list[Any]]:
        """Return all outputs, and a list of the ones equal on all replicas.

        Args:
            strategy: The strategy, outside of its replicas.
            outputs: The results of `__call__` of all replicas.
        """
        returned, state, weight = outputs
        if not (self._found or self._means or self._joined or self._unsure):
            return returned, []
        reduce = self.reduction.by("SUM")
        sums = reduce_together(strategy, reduce, state)
        variables = self._variables()
        values = {
            id(variable): value
            for variable, value in zip(variables, sums, strict=False)
        }
        flat = tf.nest.flatten(returned)
        run = functools.partial(tf.distribute.Strategy.run, strategy)
        of_all = {}
        for i in self._joined:
            if i in self._unsure:
                flat[i] = run(_without_padding_by, (weight, flat[i]))
            of_all[i] = strategy.gather(flat[i], axis=0)
        for i in self._unsure - self._joined:
            total = reduce(run(_times, (weight, flat[i])))
            of_all[i] = strategy.experimental_local_results(total)[0]
        of_all |= zip(self._means, sums[len(variables) :], strict=True)
        for i, (metric, place) in self._found.items():
            own = [values[id(variable)] for variable in metric.variables]
            result = keras.tree.flatten(metric.stateless_result(own))[place]
            # A result may be a variable itself.
            of_all[i] = values.get(id(result), result)
        for i, value in of_all.items():
            # Make it a value of each replica. `strategy.run` would treat this
            # as a call of the user's.
            flat[i] = run(tf.identity, (value,))
        identical = [flat[i] for i in of_all]
        return tf.nest.pack_sequence_as(returned, flat), identical

    def _variables(self) -> list[keras.Variable]:
        """Return the variables of the metrics that the step returned."""
        metrics = {id(metric): metric for metric, _ in self._found.values()}
        return [v for metric in metrics.values() for v in metric.variables]


def _weigh(share: Share, value: Any) -> Any:
    """Return a number scaled so that its mean over replicas weighs their rows.

    A variable counts as if it were read outside of the step: a common value is
    returned unscaled, and one to which replicas add becomes their sum. Values
    that are not numbers are returned unchanged.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if isinstance(value, (keras.Variable, tf.Variable)):
        how = getattr(value.aggregation, "name", value.aggregation)
        how, is_own = how.lower(), _is_on_read(value)
        value = tf.convert_to_tensor(value)
        if not is_own:
            return value
        if how == "sum":
            return value * tf.cast(replicas, value.dtype)
    if isinstance(value, (bool, int, float, np.generic)):
        value = tf.constant(value)
    if not tf.is_tensor(value) or value.shape.rank != 0:
        return value
    if value.dtype == tf.bool:  # Keras logs it as 0 or 1.
        value = tf.cast(value, tf.float32)
    if not value.dtype.is_floating:
        return value
    return _times(share.weight * replicas, value)


def _times(weight: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Return a value times a weight; 0 if the weight is 0, even for NaN."""
    return tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype))


def _is_on_read(variable: Any) -> bool:
    how = variable.synchronization
    return how in ("on_read", tf.VariableSynchronization.ON_READ)


def _without_padding(share: Share, value: Any) -> Any:
    return all_or_no_rows(value, share.has_rows)


def _without_padding_by(weight: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    return all_or_no_rows(value, weight > 0)
