"""Records which tensors of a step are results of metrics.

If a step returns a metric's result unchanged, the metric's variables are summed
over all replicas, and the result is computed again from these sums. This
requires that the variables are sums over rows, and take few bytes. A step may
change the variables after it has computed the result. The sums include such a
change only if a `tf.function` inside the step computed the result.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_optimizers._compat.keras_internals import has_means
from tf_optimizers._compat.strategies import Attribute
from tf_optimizers._compat.tensorflow_internals import convert
from tf_optimizers.workers.steps.metric_variables import (
    warn_without_variables,
)
from tf_optimizers.workers.steps.replica_state import replica

# If a metric's variables would take more bytes than this as float32, steps do
# not sum them over replicas.
_MOST_BYTES = 1 << 16


class Result(NamedTuple):
    """A tensor in the result of a metric.

    Attributes:
        metric: The metric, or None if its results must not be computed again.
        place: The index of the tensor in the result.
        state: The replica's values of the metric's variables, to be summed over
            replicas. Empty if `metric` is None.
    """

    metric: Any
    place: int
    state: list[tf.Tensor]


def noted_methods(metric: keras.metrics.Metric) -> list[Attribute]:
    """Return methods of a metric for `replaced`, to set during a step.

    They are the metric's `result`, and the `update_state` of the metric or, for
    Keras's group of compiled metrics, of each metric in the group.
    """
    parts = [
        each
        for each in getattr(metric, "metrics", [metric])
        if "update_state" not in vars(each)
    ]
    return [
        (metric, "result", _noted_result(metric, metric.result)),
        *((each, "update_state", _with_own_losses(each)) for each in parts),
    ]


def _noted_result(metric: keras.metrics.Metric, result: Callable) -> Callable:
    """Wrap a metric's `result` to record the tensors that it returns.

    For each tensor, the wrapper appends a triple (name, tensor, `Result`) to
    `replica.results`.
    """
    is_sum = _is_summed(metric.variables)

    def note(*args: Any, **kwargs: Any) -> Any:
        value = result(*args, **kwargs)
        if replica.results is None:
            return value
        # A result may be a variable. Without a copy, `strategy.run` would
        # return the variable itself, instead of the current value.
        tensors = [
            tf.identity(leaf)
            if isinstance(leaf, keras.Variable) or tf.is_tensor(leaf)
            else leaf
            for leaf in keras.tree.flatten(value)
        ]
        names = names_of(value, tensors, metric.name)
        known = metric if is_sum else None
        state = [*map(tf.identity, metric.variables)] if is_sum else []
        replica.results += [
            (name, tensor, Result(known, place, state))
            for place, (name, tensor) in enumerate(
                zip(names, tensors, strict=True)
            )
        ]
        return keras.tree.pack_sequence_as(value, tensors)

    return note


def _with_own_losses(metric: keras.metrics.Metric) -> Callable:
    """Return an `update_state` in which a `Loss` is not scaled for the replica.

    The replicas' sums in the metric's variables are added later. Exception: if
    the metric is a `Mean` or has one as an attribute, a `Loss` is scaled as in
    training, because the `Mean` weights it by the replica's share.
    """
    update, is_adding_up = convert(metric.update_state), not has_means(metric)

    @tf.autograph.experimental.do_not_convert
    def update_state(*args: Any, **kwargs: Any) -> Any:
        with replica.set(is_adding_up=is_adding_up):
            result = update(*args, **kwargs)
        warn_without_variables(metric)
        return result

    return update_state


def results_among(
    outputs: Sequence[Any], names: Sequence[Any], results: Sequence[Any]
) -> dict[int, Result]:
    """Return the `Result` of each output that is a metric's result, by index.

    `results` are the triples that `_noted_result` has recorded in the step.
    """
    found: dict[int, Result] = {}
    for i, (name, output) in enumerate(zip(names, outputs, strict=True)):
        for noted, tensor, result in results:
            if output is tensor or _is_number_of(output, name, tensor, noted):
                found[i] = result
            elif result.metric is not None and _is_returned(output, tensor):
                # The tensors in `result.state` belong to the inner function.
                state = [*map(tf.identity, result.metric.variables)]
                found[i] = result._replace(state=state)
    return found


def _is_returned(output: Any, tensor: Any) -> bool:
    """Return whether an inner `tf.function` returns `tensor` as `output`."""
    if not (tf.is_symbolic_tensor(output) and tf.is_symbolic_tensor(tensor)):
        return False
    while output.op.type == "Identity":
        output = output.op.inputs[0]
    if tensor.graph is output.graph or "PartitionedCall" not in output.op.type:
        return False
    function, place = output.op.get_attr("f").name, output.value_index
    returned = tensor.graph.outputs
    if tensor.graph.name not in function or place >= len(returned):
        return False
    value = returned[place]
    while value is not tensor and value.op.type == "Identity":
        value = value.op.inputs[0]
    return value is tensor


def _is_number_of(output: Any, name: Any, tensor: Any, noted: Any) -> bool:
    """Return whether a float has the name and the value of a metric's result.

    In eager mode, the steps of Keras before 3.15 return results as floats.
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
    """Return whether a metric's variables are small, and summed when read."""
    variables = list(variables)
    size = sum(math.prod(v.shape) * 4 for v in variables)
    return size <= _MOST_BYTES and all(
        v.synchronization == "on_read" and v.aggregation == "sum"
        for v in variables
    )


def names_of(
    nest: Any, flat: Sequence[Any], otherwise: Any = None
) -> list[Any]:
    """Return a name for each leaf of a nest.

    If the nest is a flat dictionary, the names are the keys. The leaves of any
    other nest all get the name `otherwise`.
    """
    is_flat = isinstance(nest, dict) and len(nest) == len(flat)
    return sorted(nest) if is_flat else [otherwise] * len(flat)
