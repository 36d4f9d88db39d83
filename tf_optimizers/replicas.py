"""All that optimizers and callbacks ask of the replicas they run on."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers._compat.keras_internals import strategy_of


def is_sparse_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Return whether it is a `SparseMultiWorkerMirroredStrategy`."""
    return getattr(strategy.extended, "is_sparse_multi_worker", False)


def rank_among(count: int) -> int:
    """Return the calling replica's rank among `count`.

    Args:
        count: How many replicas there are of its process, or of all.
    """
    context = tf.distribute.get_replica_context()
    # All workers have equally many replicas, numbered worker by worker.
    return tf.get_static_value(context.replica_id_in_sync_group) % count


class Workers:
    """The worker processes of a strategy.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`, or any of one process.

    Attributes:
        index: This process's index, from 0.
        count: How many processes there are.
        replicas: How many replicas all of them have.
        local_replicas: How many replicas each of them has.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.index, self.count = 0, 1
        if is_sparse_multi_worker(strategy):
            self.index = strategy.extended.worker_index
            self.count = strategy.extended.workers
        elif isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise TypeError(
                "The strategy must be a "
                "`tfo.SparseMultiWorkerMirroredStrategy`, or one of a single "
                f"process. Received: {type(strategy).__name__}, under which "
                "Keras 3 does not `fit`."
            )
        self.replicas = strategy.num_replicas_in_sync
        self.local_replicas = self.replicas // self.count
        self._strategy = strategy

    @property
    def is_first(self) -> bool:
        """Whether this process warns and writes for all."""
        return self.index == 0

    def gather(self, statement: Any) -> list[Any]:
        """Return the statements of all workers, which JSON can hold.

        Every worker must call this equally often, in the same order.
        """
        if self.count == 1:
            return [statement]
        return self._strategy.extended.gather_statements(
            self._strategy,
            "a backup",
            statement,
            "Pass `BackupAndRestore` to `fit` on every worker.",
        )


def check_same_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise unless all workers take the same first step with an optimizer."""
    strategy = strategy_of(optimizer)
    if is_sparse_multi_worker(strategy):
        strategy.extended.check_same_optimizer(strategy, optimizer, variables)


def average(strategy: Any, variables: Sequence[Any]) -> None:
    """Assign the mean over all replicas, of all variables in one exchange."""
    if strategy.num_replicas_in_sync == 1 or not variables:
        return
    # The mean of equal float32 values is the same value in float64.
    means = reduce_together(
        strategy, reducing(strategy, "MEAN"), variables, tf.float64
    )
    for variable, mean in zip(variables, means, strict=True):
        for component in local_copies(strategy, variable):
            component.assign(tf.cast(mean, variable.dtype))


def reducing(strategy: Any, reduce_op: str) -> Callable[[Any], Any]:
    """Return TensorFlow's `reduce`, without what our strategy adds to it."""
    op = tf.distribute.ReduceOp(reduce_op)
    return lambda value: tf.distribute.Strategy.reduce(
        strategy, op, value, axis=None
    )


def reduce_together(
    strategy: Any,
    reduce: Callable[[Any], Any],
    values: Sequence[Any],
    dtype: tf.DType | None = None,
) -> list[tf.Tensor]:
    """Return reduced values; those of one dtype travel in one tensor.

    Args:
        strategy: The strategy, outside of its replicas.
        reduce: Called with a tensor of each replica; returns what these are
            reduced to.
        values: Tensors of each replica, or variables, of known shapes.
        dtype: What they are cast to before. Defaults to their own.
    """
    local = [local_copies(strategy, value) for value in values]
    groups: dict[tf.DType, list[int]] = {}
    for i, (first, *_) in enumerate(local):
        groups.setdefault(dtype or first.dtype, []).append(i)
    reduced: dict[int, tf.Tensor] = {}
    for kind, group in groups.items():
        join = functools.partial(_join, kind)
        if tf.executing_eagerly():
            own = zip(*(local[i] for i in group), strict=True)
            joined = strategy.experimental_distribute_values_from_function(
                lambda _, join=join, own=own: join(*next(own))
            )
        else:
            # Our strategy's own `run` would take note of what it returns.
            joined = tf.distribute.Strategy.run(
                strategy, join, [values[i] for i in group]
            )
        total = strategy.experimental_local_results(reduce(joined))[0]
        shapes = [local[i][0].shape for i in group]
        parts = tf.split(total, list(map(math.prod, shapes)))
        reduced |= zip(group, map(tf.reshape, parts, shapes), strict=True)
    return [reduced[i] for i in range(len(values))]


def _join(dtype: tf.DType, *values: Any) -> tf.Tensor:
    flat = [tf.reshape(tf.cast(value, dtype), [-1]) for value in values]
    return tf.concat(flat, 0)


def local_copies(strategy: Any, variable: Any) -> Sequence[tf.Variable]:
    """Return the copies of a variable in this process."""
    is_keras = isinstance(variable, keras.Variable)
    return strategy.experimental_local_results(
        variable.value if is_keras else variable
    )


def digests(values: Iterable[np.ndarray]) -> list[str]:
    """Return the digests of the distinct values."""
    return sorted(
        {
            hashlib.blake2b(as_bytes(value).data, digest_size=16).hexdigest()
            for value in values
        }
    )


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array of any dtype, bfloat16 included."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
