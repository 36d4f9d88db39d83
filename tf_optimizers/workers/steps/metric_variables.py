"""Warns about wrong uses of metrics' variables in steps.

Outside of a step, reading a metric's variable returns the sum over replicas,
unless the variable was added with another `aggregation`. The sum is right for

    total.assign(total + sum_over_rows)

and wrong for a maximum, a mean or the last value. Within a step, the variable
has the value for the replica's rows. If the step returns the metric's
`result()`, the result is computed again from the sums; see `metric_results`.
Other outputs that the step computes from the variable count only the replica's
rows.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers._compat import distinct
from tf_optimizers._compat.keras_internals import attributes_of, path_of
from tf_optimizers.replicas import replicas_of

# Ops that return the value of their first operand.
_PASS_THROUGH = ("Identity", "Cast", "EnsureShape", "Reshape", "StopGradient")
_SUMS = ("AddV2", "Add", "AddN")
# Ops that add to their first operand, or subtract from it.
_ADDITIONS = ("Sub", "TensorScatterAdd", "TensorScatterSub")
# Types of attributes that may hold a metric's values from earlier steps.
_VALUES = (list, dict, np.ndarray, tf.Variable)


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return a model's metrics.

    These are `model.metrics`, and the metrics in attributes of the model, its
    layers and losses.
    """
    found = [*model.metrics, *attributes_of(model, keras.metrics.Metric)]
    return distinct(found)


def warn_unless_sum(
    variable: keras.Variable, old: tf.Tensor, value: tf.Tensor, rows: Any
) -> None:
    """Warn if a step in a graph assigns anything but 0 or a sum over rows.

    A value counts as a sum over rows if it is the variable's old value plus or
    minus values that do not depend on the old value. A constant that cannot be
    a number of rows must not be added. If the variable's aggregation is not
    "sum", nothing is checked.

    `old` is the variable's value before the assignment. `rows` is the replica's
    number of rows; an int if it is static.
    """
    if variable.aggregation != "sum" or not tf.is_symbolic_tensor(value):
        return
    source = source_of(old)
    if _adds_constant(value, source, rows):
        _warn(
            "A metric's variable must be a sum over rows, since its values on "
            f"all replicas are added. Received: `{path_of(variable)}`, to "
            "which a step adds a constant, such as a number of batches. If "
            "batches cannot be split evenly, results may differ from those of "
            "one process. Add a number of rows, or use `keras.metrics.Mean`."
        )
    elif not is_zero(value) and not _is_sum(value, source):
        _warn(
            "A metric's variable must be a sum over rows, since its values on "
            f"all replicas are added. Received: `{path_of(variable)}`, to "
            "which a step assigns something else, such as a maximum or a "
            "moving average. Add only sums over rows to the variable, or "
            "create it with "
            "`add_variable(..., aggregation='mean')`, to get the mean of the "
            "replicas' values instead of their sum."
        )


def warn_without_variables(metric: keras.metrics.Metric) -> None:
    """Warn if a step updates a metric that has values but no `variables`.

    A metric without either may return the learning rate, for example.
    """
    if metric.variables:
        return
    base = vars(keras.metrics.Metric(name="base"))
    added = [v for name, v in vars(metric).items() if name not in base]
    if any(isinstance(value, _VALUES) for value in added):
        _warn(
            "A metric must have variables from its `add_variable`, since "
            "only their values on all replicas are added. Received: "
            f"`{metric.name}`, without such variables. Its results do not "
            "count the rows of all replicas. Use `add_variable` instead of "
            "lists or `tf.Variable`s, or compute the result from the "
            "predictions of `model.predict` in a callback's `on_epoch_end`."
        )


def is_zero(value: tf.Tensor) -> bool:
    """Return whether a tensor is a constant 0, as when a metric is reset."""
    known = tf.get_static_value(value)
    return known is not None and not known.any()


def warn_if_made_of(
    variables: Iterable[keras.Variable], outputs: Sequence[tuple[Any, Any]]
) -> None:
    """Warn if a step in a graph computes an output from metrics' variables.

    Args:
        variables: The variables of metrics to which the step has assigned.
        outputs: A pair (name or None, value) for each output of the step that
            is not the result of a metric.
    """
    if tf.executing_eagerly():
        return  # Only a graph shows which values an output depends on.
    sources: dict[int, keras.Variable] = {}
    for variable in variables:
        source = source_of(tf.convert_to_tensor(variable))
        sources[id(source)] = variable
    for name, output in outputs:
        read = _read_by(output, sources) if sources else None
        if read is not None:
            _warn(
                "A step must return a metric's `result()` to count all rows. "
                f"Received: {f'`{name}`' if name else 'a value'}, which "
                f"depends on `{path_of(read)}` but is not the `result()` of "
                "one of the model's metrics. Keras shows a mean of the "
                "replicas' values, weighted by their rows in the last batch. "
                "List the metric in the model's `metrics`, and compute the "
                "value in the metric's `result()`."
            )


def _warn(message: str) -> None:
    """Warn on the first replica of the first worker only."""
    if replicas_of().rank == 0:
        warnings.warn(message, stacklevel=2)


def source_of(tensor: tf.Tensor) -> Any:
    """Return the handle of the variable that a tensor is read from, or None."""
    while tensor.op.type in _PASS_THROUGH:
        tensor = tensor.op.inputs[0]
    return tensor.op.inputs[0] if tensor.op.type == "ReadVariableOp" else None


def _is_sum(value: tf.Tensor, source: Any) -> bool:
    """Return whether a tensor is a sum that includes a variable's old value.

    `source` is the handle of the variable.
    """
    op = value.op
    if op.type in _PASS_THROUGH:
        return _is_sum(op.inputs[0], source)
    if op.type in _ADDITIONS or op.type in _SUMS:
        old = [i for i, e in enumerate(op.inputs) if _depends_on(e, source)]
        is_added_to = len(old) == 1 and (op.type in _SUMS or old == [0])
        return is_added_to and _is_sum(op.inputs[old[0]], source)
    if op.type in ("SelectV2", "Select"):
        return all(_is_sum(each, source) for each in op.inputs[1:])
    return source is not None and source_of(value) is source


def _adds_constant(value: tf.Tensor, source: Any, rows: Any) -> bool:
    """Return whether a tensor is a variable's old value plus a constant.

    Constants that may be a number of rows, such as 0, do not count. `source` is
    the handle of the variable.
    """
    op = value.op
    if op.type in _PASS_THROUGH:
        return _adds_constant(op.inputs[0], source, rows)
    if op.type not in _SUMS or source is None:
        return False
    added = [each for each in op.inputs if source_of(each) is not source]
    known = tf.get_static_value(added[0]) if len(added) == 1 else None
    if known is None or not known.any():
        return False
    return not isinstance(rows, int) or (known % max(rows, 1)).any()


def _read_by(
    output: Any, sources: dict[int, keras.Variable]
) -> keras.Variable | None:
    """Return a variable in `sources` that an output depends on, or None.

    `sources` contains the variables by the ids of their handles. Outputs other
    than floating-point tensors are ignored.
    """
    if not tf.is_symbolic_tensor(output) or not output.dtype.is_floating:
        return None
    for op in operations_behind(output):
        if op.type == "ReadVariableOp" and id(op.inputs[0]) in sources:
            return sources[id(op.inputs[0])]
    return None


def _depends_on(tensor: tf.Tensor, source: Any) -> bool:
    """Return whether a tensor depends on the variable with handle `source`."""
    return any(
        each is source for op in operations_behind(tensor) for each in op.inputs
    )


def depends_on_rows(tensor: tf.Tensor) -> bool:
    """Return whether a tensor depends on an input of its graph, such as rows.

    Constants, and values read from variables, do not count as inputs.
    """
    return any(
        not op.inputs and op.type != "Const" for op in operations_behind(tensor)
    )


def operations_behind(
    tensor: tf.Tensor,
    is_entered: Callable[[str], bool] = lambda kind: kind != "ReadVariableOp",
) -> Iterator[tf.Operation]:
    """Yield the operations that a tensor depends on.

    `is_entered` is called with the type of an operation, and returns whether to
    search its inputs, too. By default, the search ends at reads of variables.
    """
    waiting: list[tf.Operation] = [tensor.op]
    seen = {tensor.op}
    while waiting:
        op = waiting.pop()
        yield op
        if is_entered(op.type):
            new = {each.op for each in op.inputs} - seen
            seen |= new
            waiting += new
