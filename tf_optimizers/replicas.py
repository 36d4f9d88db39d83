"""All that optimizers and callbacks ask of the replicas they run on."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers.codes.entries import Entries


class ReplicaGroup:
    """The replicas of one of TensorFlow's strategies, which one process runs.

    A strategy whose workers exchange more has a subclass of this at
    `strategy.extended.replica_group`. What replicas call, all must call, in
    the same order.

    Args:
        strategy: The strategy.

    Attributes:
        count: How many replicas there are.
        packs_entries: Whether `exchange` encodes entries in few bits.
        averages_statistics: Whether the strategy itself gives all replicas
            the same variables before these are read.
    """

    packs_entries = False
    averages_statistics = False

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self.count = strategy.num_replicas_in_sync

    @property
    def rank(self) -> int:
        """The calling replica's number among all; those of a worker follow."""
        context = tf.distribute.get_replica_context()
        return tf.get_static_value(context.replica_id_in_sync_group)

    @property
    def devices(self) -> Sequence[str]:
        """The devices of this process's replicas; "" without a strategy."""
        try:
            return self._strategy.extended.worker_devices
        except RuntimeError:  # From TensorFlow's default strategy.
            return [""]

    @property
    def workers(self) -> int:
        """How many processes there are."""
        if isinstance(
            self._strategy, tf.distribute.MultiWorkerMirroredStrategy
        ):
            raise TypeError(
                "The strategy must be a "
                "`tfo.SparseMultiWorkerMirroredStrategy`, or one of a single "
                f"process. Received: {type(self._strategy).__name__}, under "
                "which Keras 3 does not `fit`."
            )
        return 1

    @property
    def worker(self) -> int:
        """This process's number among the workers; the first warns for all."""
        return self.workers - 1

    @property
    def has_owners(self) -> bool:
        """Whether values can go to their owners, and back."""
        return isinstance(self._strategy, tf.distribute.MirroredStrategy)

    def sum(self, values: Any) -> Any:
        """Return the sums over replicas of a nest, in each of them."""
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

    def sum_on_worker(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums over this process's replicas, in each of them."""
        return self.sum(list(values))

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """Return sums over replicas; for `Entries`, the slices of all."""
        return self.sum(
            [v.slices() if isinstance(v, Entries) else v for v in values]
        )

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """Send each replica its row of [N, ...]; return their rows for this.

        Only where the group packs entries.
        """
        raise NotImplementedError

    def sum_at_owners(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return the sums over replicas; those of others mean nothing."""

        def merged(strategy: Any, values: Any) -> list[tf.Tensor]:
            # One by one: several together are summed on all devices.
            sums = [
                strategy.extended.reduce_to(
                    tf.distribute.ReduceOp.SUM, value, self.devices[owner]
                )
                for value, owner in zip(values, owners, strict=True)
            ]
            return [strategy.experimental_local_results(s)[0] for s in sums]

        return _merge_call(merged, values)

    def gather_from_owners(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return what the owners have of values that all replicas have."""

        def merged(strategy: Any, values: Any) -> list[tf.Tensor]:
            return [
                strategy.experimental_local_results(value)[owner]
                for value, owner in zip(values, owners, strict=True)
            ]

        return _merge_call(merged, values)

    def agree(
        self, subject: str, statement: Any, hint: str | None = None
    ) -> list[Any]:
        """Return what all workers state, outside of replicas.

        Every worker must call this equally often, in the same order.

        Args:
            subject: What the statement is about.
            statement: What JSON can hold.
            hint: What to do if a worker does not reach the subject.
        """
        del subject, hint
        return [statement]

    def check_same_optimizer(
        self, optimizer: Any, variables: Sequence[Any]
    ) -> None:
        """Raise unless all workers take the same first step."""


def replicas_of(
    strategy: tf.distribute.Strategy | None = None,
) -> ReplicaGroup:
    """Return what to ask of a strategy's replicas; by default, of this one."""
    strategy = strategy or tf.distribute.get_strategy()
    kind = getattr(strategy.extended, "replica_group", ReplicaGroup)
    return kind(strategy)


def _merge_call(merged: Any, values: Sequence[tf.Tensor]) -> Any:
    context = tf.distribute.get_replica_context()
    return context.merge_call(merged, args=(list(values),))


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
