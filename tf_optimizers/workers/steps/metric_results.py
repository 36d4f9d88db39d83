"""Notes which tensors of a step are results of metrics.

A metric's result is computed again from what its variables are over all
replicas, where a step returns it as it is.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers.workers.steps.share import replica

# What a metric may have in variables that are summed with every step.
_MOST_BYTES = 1 << 16


def noted_result(metric: keras.metrics.Metric, result: Callable) -> Callable:
    """Return a `result` whose tensors are known in a step.

    Of one that is not computed again, no metric is noted.
    """
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
        names = names_of(value, tensors, metric.name)
        replica.results += [
            (name, tensor, metric if is_sum else None, place)
            for place, (name, tensor) in enumerate(
                zip(names, tensors, strict=True)
            )
        ]
        return keras.tree.pack_sequence_as(value, tensors)

    return note


def is_number_of(output: Any, name: Any, tensor: Any, noted: Any) -> bool:
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


def names_of(
    nest: Any, flat: Sequence[Any], otherwise: Any = None
) -> list[Any]:
    """Return the names of the leaves of a flat dictionary, in their order."""
    is_flat = isinstance(nest, dict) and len(nest) == len(flat)
    return sorted(nest) if is_flat else [otherwise] * len(flat)
