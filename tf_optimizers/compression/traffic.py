"""Counts the bytes that a replica sends."""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.keras_internals import built_variables, unique_paths
from tf_optimizers._compat.tensorflow_internals import plain_variable
from tf_optimizers.base.components import components, own_component
from tf_optimizers.base.precision import state_dtype
from tf_optimizers.checks import check_built, check_integer
from tf_optimizers.compression.wire import Wire
from tf_optimizers.replicas import replicas_of


def traffic_summary(optimizer: Any, step: int | None) -> dict[str, Any]:
    """Return the result of `CompressedOptimizer.communication_summary`."""
    check_built(optimizer, "communication_summary")
    if step is None:
        step = int(tf.convert_to_tensor(optimizer.iterations))
    step = check_integer("step", step, 0)
    schedule = optimizer._compressor.schedule
    sparsity = schedule.stages[schedule.stage(step)]
    sent = optimizer._compressor.sent_bytes(sparsity)
    variables = built_variables(optimizer)
    dense = list(map(_dense_bytes, variables))
    taken = [sent.get(i, size) for i, size in enumerate(dense)]
    names = unique_paths(variables)
    return {
        "step": step,
        "sparsity": sparsity or 0.0,
        "variables": dict(zip(names, map(_row, dense, taken), strict=True)),
        "total": _row(sum(dense), sum(taken)),
    }


def _dense_bytes(variable: Any) -> int:
    dtype = tf.as_dtype(state_dtype(variable.dtype))
    return tf.TensorShape(variable.shape).num_elements() * dtype.size


def _row(dense: int, sent: int) -> dict[str, float]:
    ratio = dense / sent if sent else math.inf
    return {"dense_bytes": dense, "sent_bytes": sent, "ratio": ratio}


class SentRows:
    """Counts the bytes of gradients that are `tf.IndexedSlices`.

    Tracing a step shows which gradients are sparse, and running it shows how
    many rows they have. Once a gradient has been sparse, all later gradients of
    the variable count as sparse. Only the rows of a process's first replica are
    counted.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._bytes: dict[int, tf.Variable] = {}
        self._expected: set[int] = set()
        self._is_known = False

    def count(self, index: int, gradient: Gradient, variable: Any) -> None:
        """Count a gradient's bytes if it is sparse, or an earlier one was."""
        self._expected.discard(index)
        self._is_known = True
        is_sparse = self.is_sparse(index, gradient)
        if not is_sparse or replicas_of().rank % len(components(variable)):
            return
        if index not in self._bytes:
            with tf.init_scope(), tf.device(own_component(variable).device):
                self._bytes[index] = plain_variable(tf.zeros([], tf.int64))
        self._bytes[index].assign(self._size(gradient))

    def _size(self, gradient: Gradient) -> tf.Tensor:
        if isinstance(gradient, tf.IndexedSlices):
            rows = tf.size(gradient.indices, tf.int64)
            return rows * self._wire.row_bytes(gradient)
        return tf.size(gradient, tf.int64) * gradient.dtype.size

    def is_sparse(self, index: int, gradient: Gradient) -> bool:
        """Return whether a variable's gradient is or has been sparse."""
        return isinstance(gradient, tf.IndexedSlices) or index in self._bytes

    def __contains__(self, index: int) -> bool:
        """Return whether a gradient is known or expected to be sparse."""
        return index in self._bytes or index in self._expected

    @property
    def indices(self) -> tuple[int, ...] | None:
        """The indices of variables with sparse gradients; None if unknown."""
        if not self._is_known:
            return None
        return tuple(sorted(self._expected.union(self._bytes)))

    def expect(self, indices: Sequence[int]) -> None:
        """Treat the gradients of these variables as sparse.

        For each variable, this ends when a step that updates it is traced, or
        runs in eager mode.
        """
        self._expected.update(indices)
        self._is_known = True

    def sent(self) -> dict[int, int]:
        """Return the bytes of sparse gradients in the last step, by index."""
        return {
            index: int(tf.convert_to_tensor(size))
            for index, size in self._bytes.items()
        }
