"""Runs steps of Keras models, and reduces what they return.

numbers        count by the replica's rows: Keras takes their mean
arrays         likewise, or are joined if they have an element for each row
metrics        become what they are over the rows of all replicas
predictions    are those of rows that are the replica's
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import convert
from tf_optimizers.replicas import reduce_together
from tf_optimizers.workers._compat.batches import step_of
from tf_optimizers.workers.data.batch_metadata import Rows, rows_of
from tf_optimizers.workers.data.sharing import share_arguments
from tf_optimizers.workers.steps.metric_results import (
    is_number_of,
    names_of,
    noted_result,
)
from tf_optimizers.workers.steps.metric_variables import (
    metrics_of,
    warn_if_made_of,
)
from tf_optimizers.workers.steps.put_back import PutBack
from tf_optimizers.workers.steps.share import (
    Share,
    count_rows,
    empty_without_rows,
    make_kept,
    replica,
    share_of,
    take_or_leave,
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
        # Of batches that are passed by hand, to train and to predict.
        self._seen: weakref.WeakKeyDictionary[keras.Model, Any] = (
            weakref.WeakKeyDictionary()
        )

    def of(
        self, function: Callable, args: Any, kwargs: Any
    ) -> tuple["Step | None", Any]:
        """Return a model's step to be run in place of a function, if it is one.

        Also its arguments, as they are shared among replicas. Other functions
        count rows by themselves.
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
        args = share_arguments(self._strategy, args, seen)
        known = rows_of(args), self._kept
        if is_predicting:
            return Step(step, kind, _predicted, [], *known), args
        self._watch(model)
        return Step(step, kind, _weigh, metrics_of(model), *known), args


class Step:
    """One run of a step of a model.

    Args:
        function: Called with a replica's part of a batch.
        kind: See `step_of`.
        as_returned: Called with the replica's share and each output that is no
            result of a metric; returns what replicas return.
        metrics: Those of the model.
        rows: What is known of all replicas' rows, or None.
        kept: See `share_of`.
    """

    def __init__(
        self,
        function: Callable,
        kind: str,
        as_returned: Callable[[Share, Any], Any],
        metrics: Sequence[keras.metrics.Metric],
        rows: Rows | None,
        kept: Sequence[tf.Variable],
    ) -> None:
        method = getattr(function, "__func__", None)
        self._is_keras = method is keras.Model.train_step
        self._is_training = kind == "train_step"
        # Only what the user has written is converted by AutoGraph.
        self._function, self._as_returned = convert(function), as_returned
        self._metrics, self._rows, self._kept = metrics, rows, kept
        self._undo = contextlib.ExitStack()
        self._found: dict[int, tuple[Any, int]] = {}
        self._means: list[int] = []
        self._joined: set[int] = set()

    @_as_it_is
    def __call__(self, batch: Any) -> tuple[Any, list[tf.Tensor]]:
        """Return what a replica's step does, and its metrics' variables."""
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
            is_training=self._is_training,
            weights=PutBack(),
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
        arrays = [i for i in others if self._is_array(outputs[i])]
        rows = count_rows(batch)  # A number or None, as in shapes.
        rows = rows if isinstance(rows, int) else None
        self._joined = {i for i in arrays if outputs[i].shape[0] == rows}
        self._means = [
            i
            for i in arrays
            if i not in self._joined and outputs[i].shape.is_fully_defined()
        ]
        state = [
            *map(tf.convert_to_tensor, self._variables()),
            *(_times(share.weight, outputs[i]) for i in self._means),
        ]
        for i in others:
            is_of_rows = i in self._joined
            as_returned = _predicted if is_of_rows else self._as_returned
            outputs[i] = as_returned(share, outputs[i])
        return tf.nest.pack_sequence_as(returned, outputs), state

    def _is_array(self, value: Any) -> bool:
        """Tell whether a step that does not predict returns an array."""
        return (
            self._as_returned is _weigh
            and tf.is_symbolic_tensor(value)
            and bool(value.shape.rank)
            and value.dtype.is_floating
        )

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note which tensors are results of the metrics."""
        with self._undo:
            for metric in self._metrics:
                self._note(metric)
            yield

    def _note(self, metric: keras.metrics.Metric) -> None:
        """Note the results of a metric, until the step ends."""
        if "result" in vars(metric):
            return
        result = noted_result(metric, metric.result)
        # Not `setattr`: Keras tracks what a metric has.
        self._undo.callback(vars(metric).pop, "result")
        vars(metric)["result"] = result

    @_as_it_is
    def finish(self, strategy: Any, outputs: Any) -> tuple[Any, list[Any]]:
        """Return the outputs, and those among them that are alike everywhere.

        Args:
            strategy: The strategy, outside of its replicas.
            outputs: What it has returned of all replicas.
        """
        returned, state = outputs
        if not (self._found or self._means or self._joined):
            return returned, []
        beside = functools.partial(strategy.extended.reduce_beside, "SUM")
        sums = reduce_together(strategy, beside, state)
        variables = self._variables()
        values = {
            id(variable): value
            for variable, value in zip(variables, sums, strict=False)
        }
        flat = tf.nest.flatten(returned)
        of_all = {i: strategy.gather(flat[i], axis=0) for i in self._joined}
        of_all |= zip(self._means, sums[len(variables) :], strict=True)
        for i, (metric, place) in self._found.items():
            own = [values[id(variable)] for variable in metric.variables]
            result = keras.tree.flatten(metric.stateless_result(own))[place]
            # If it is a variable.
            of_all[i] = values.get(id(result), result)
        for i, value in of_all.items():
            # As replicas return it; the strategy's own `run` would count it.
            flat[i] = tf.distribute.Strategy.run(
                strategy, tf.identity, (value,)
            )
        alike = [flat[i] for i in of_all]
        return tf.nest.pack_sequence_as(returned, flat), alike

    def _variables(self) -> list[keras.Variable]:
        """Return the variables of the metrics that the step returned."""
        metrics = {id(metric): metric for metric, _ in self._found.values()}
        return [v for metric in metrics.values() for v in metric.variables]


def _weigh(share: Share, value: Any) -> Any:
    """Return what has a number as its mean over replicas, by their rows.

    A variable that all replicas have alike is as it is, and one to which each
    adds is the sum, as if it were read outside of the step.
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
    """Return a value times a weight; 0 without rows, even if it is NaN."""
    return tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype))


def _is_on_read(variable: Any) -> bool:
    how = variable.synchronization
    return how in ("on_read", tf.VariableSynchronization.ON_READ)


def _predicted(share: Share, value: Any) -> Any:
    return take_or_leave(value, share.has_rows)
