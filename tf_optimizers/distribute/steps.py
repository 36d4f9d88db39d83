"""Runs steps of Keras models, and reduces what they return.

numbers        count by the replica's rows: Keras takes their mean
metrics        become what they are over the rows of all replicas
predictions    are those of rows that are the replica's
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers._compat.batches import step_of
from tf_optimizers._compat.replicas import convert
from tf_optimizers.data.notes import Rows, rows_of
from tf_optimizers.data.sharing import share_arguments
from tf_optimizers.distribute.put_back import PutBack
from tf_optimizers.distribute.share import (
    Share,
    empty_without_rows,
    make_kept,
    replica,
    share_of,
    take_or_leave,
)

# What a metric may have in variables that are summed with every step.
_MOST_BYTES = 1 << 16

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
        model, step, is_predicting = found
        seen = self._seen.setdefault(model, ({}, {}))[is_predicting]
        args = share_arguments(self._strategy, args, seen)
        known = rows_of(args), self._kept
        if is_predicting:
            return Step(step, _predicted, [], *known), args
        self._watch(model)
        return Step(step, _weigh, model.metrics, *known), args


class Step:
    """One run of a step of a model.

    Args:
        function: Called with a replica's part of a batch.
        as_returned: Called with the replica's share and each output that is no
            result of a metric; returns what replicas return.
        metrics: Those of the model.
        rows: What is known of all replicas' rows, or None.
        kept: See `share_of`.
    """

    def __init__(
        self,
        function: Callable,
        as_returned: Callable[[Share, Any], Any],
        metrics: Sequence[keras.metrics.Metric],
        rows: Rows | None,
        kept: Sequence[tf.Variable],
    ) -> None:
        method = getattr(function, "__func__", None)
        self._is_keras = method is keras.Model.train_step
        name = getattr(function, "__name__", "")  # AutoGraph adds "tf__".
        self._is_training = name.removeprefix("tf__") == "train_step"
        # Only what the user has written is converted by AutoGraph.
        self._function, self._as_returned = convert(function), as_returned
        self._metrics, self._rows, self._kept = metrics, rows, kept
        self._found: dict[int, tuple[Any, int]] = {}

    @_as_it_is
    def __call__(self, batch: Any) -> tuple[Any, dict[str, tf.Tensor]]:
        """Return what a replica's step does, and its metrics' variables."""
        share = share_of(batch, self._rows, self._kept)
        batch = empty_without_rows(batch, self._rows)
        results: list[Any] = []
        with replica.set(
            share=share,
            results=results,
            is_keras=self._is_keras,
            is_training=self._is_training,
            weights=PutBack(),
            scaled=set(),
        ):
            returned = self._function(batch)
        outputs = tf.nest.flatten(returned)
        self._found = {
            i: (metric, place)
            for i, (name, output) in enumerate(
                zip(_names(returned, len(outputs)), outputs, strict=True)
            )
            for noted, tensor, metric, place in results
            if output is tensor or _is_number_of(output, name, tensor, noted)
        }
        for i in set(range(len(outputs))) - set(self._found):
            outputs[i] = self._as_returned(share, outputs[i])
        state = _pack(self._variables())
        return tf.nest.pack_sequence_as(returned, outputs), state

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note which tensors are results of the metrics."""
        with contextlib.ExitStack() as undo:
            for metric in self._metrics:
                result = _noted(metric, metric.result)
                # Not `setattr`: Keras tracks what a metric has.
                undo.callback(vars(metric).pop, "result")
                vars(metric)["result"] = result
            yield

    @_as_it_is
    def finish(self, strategy: Any, outputs: Any) -> tuple[Any, list[Any]]:
        """Return the outputs, and those among them that are alike everywhere.

        Args:
            strategy: The strategy, outside of its replicas.
            outputs: What it has returned of all replicas.
        """
        returned, state = outputs
        if not self._found:
            return returned, []
        sums = {
            name: strategy.experimental_local_results(
                strategy.extended.reduce_beside("SUM", parts)
            )[0]
            for name, parts in state.items()
        }
        values = _unpack(sums, self._variables())
        flat = tf.nest.flatten(returned)
        for i, (metric, place) in self._found.items():
            own = [values[id(variable)] for variable in metric.variables]
            result = keras.tree.flatten(metric.stateless_result(own))[place]
            result = values.get(id(result), result)  # If it is a variable.
            # As replicas return it; the strategy's own `run` would count it.
            flat[i] = tf.distribute.Strategy.run(
                strategy, tf.identity, (result,)
            )
        alike = [flat[i] for i in self._found]
        return tf.nest.pack_sequence_as(returned, flat), alike

    def _variables(self) -> list[keras.Variable]:
        """Return the variables of the metrics that the step returned."""
        metrics = {id(metric): metric for metric, _ in self._found.values()}
        return [v for metric in metrics.values() for v in metric.variables]


def _noted(metric: keras.metrics.Metric, result: Callable) -> Callable:
    """Return a `result` whose tensors are known in a step."""
    is_sum = _is_summed(metric.variables)

    def note(*args: Any, **kwargs: Any) -> Any:
        value = result(*args, **kwargs)
        if replica.results is None:
            return value
        # A variable would be returned as one of the strategy's.
        tensors = [
            tf.identity(leaf)
            if isinstance(leaf, keras.Variable) or tf.is_tensor(leaf)
            else leaf
            for leaf in keras.tree.flatten(value)
        ]
        if is_sum:
            names = _names(value, len(tensors), metric.name)
            replica.results += [
                (name, tensor, metric, place)
                for place, (name, tensor) in enumerate(
                    zip(names, tensors, strict=True)
                )
            ]
        return keras.tree.pack_sequence_as(value, tensors)

    return note


def _names(nest: Any, count: int, otherwise: Any = None) -> list[Any]:
    """Return the names of the leaves of a flat dictionary, in their order."""
    is_flat = isinstance(nest, dict) and len(nest) == count
    return sorted(nest) if is_flat else [otherwise] * count


def _is_number_of(output: Any, name: Any, tensor: Any, noted: Any) -> bool:
    """Tell whether a step has returned a result as a Python number.

    Eagerly it may, as all of Keras's own do before 3.15.
    """
    return (
        isinstance(output, float)
        and name == noted
        and isinstance(tensor, tf.Tensor)
        and tf.executing_eagerly()
        and tensor.shape.num_elements() == 1
        and float(tf.reshape(tensor, [])) == output
    )


def _is_summed(variables: Iterable[keras.Variable]) -> bool:
    """Tell whether a metric is that of its variables' sums, if these are few.

    A large confusion matrix is not exchanged with every step.
    """
    variables = list(variables)
    size = sum(math.prod(v.shape) * 4 for v in variables)
    return size <= _MOST_BYTES and all(
        v.synchronization == "on_read" and v.aggregation == "sum"
        for v in variables
    )


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
    weight = tf.cast(share.weight * replicas, value.dtype)
    return tf.math.multiply_no_nan(value, weight)


def _is_on_read(variable: Any) -> bool:
    how = variable.synchronization
    return how in ("on_read", tf.VariableSynchronization.ON_READ)


def _predicted(share: Share, value: Any) -> Any:
    return take_or_leave(value, share.has_rows)


def _pack(variables: Iterable[keras.Variable]) -> dict[str, tf.Tensor]:
    """Return the values of variables in one tensor for each dtype."""
    groups: dict[str, list[tf.Tensor]] = {}
    for variable in variables:
        value = tf.reshape(tf.convert_to_tensor(variable), [-1])
        groups.setdefault(value.dtype.name, []).append(value)
    return {name: tf.concat(group, 0) for name, group in groups.items()}


def _unpack(
    packed: dict[str, tf.Tensor], variables: Iterable[keras.Variable]
) -> dict[int, tf.Tensor]:
    """Return the values by the variables' ids."""
    values, begin = {}, dict.fromkeys(packed, 0)
    for variable in variables:
        size = math.prod(variable.shape)
        name = tf.as_dtype(variable.dtype).name
        flat = packed[name][begin[name] : begin[name] + size]
        values[id(variable)] = tf.reshape(flat, variable.shape)
        begin[name] += size
    return values
