"""Lets optimizers and callbacks exchange values between replicas."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import backend_variable
from tf_optimizers.codes.entries import Entries, join, split


class ReplicaGroup:
    """The replicas of one of TensorFlow's own strategies.

    `tfo.SparseMultiWorkerMirroredStrategy` uses a subclass, the value of
    `strategy.extended.replica_group`. All replicas must make the same exchanges
    in the same order.

    Attributes:
        count: The number of replicas.
        packs_entries: Whether `gather_and_sum` encodes entries in few bits.
        averages_statistics: Whether the strategy itself averages statistics
            that steps assign, such as those of `BatchNormalization`.
        exchanges_later: Whether replicas can exchange values while the next
            steps run; see `later`.
    """

    packs_entries = averages_statistics = exchanges_later = False

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self.count = strategy.num_replicas_in_sync

    @property
    def rank(self) -> int:
        """The calling replica's number among all replicas.

        The replicas of a worker have consecutive numbers.
        """
        context = tf.distribute.get_replica_context()
        return tf.get_static_value(context.replica_id_in_sync_group)

    @property
    def devices(self) -> Sequence[str]:
        """The devices of this process's replicas; [""] without a strategy."""
        try:
            return self._strategy.extended.worker_devices
        except RuntimeError:  # TensorFlow's default strategy has no devices.
            return [""]

    @property
    def workers(self) -> int:
        """The number of processes.

        Raises:
            TypeError: Under TensorFlow's strategy for several processes.
        """
        if isinstance(
            self._strategy, tf.distribute.MultiWorkerMirroredStrategy
        ):
            raise TypeError(
                "A multi-worker strategy must be a "
                "`tfo.SparseMultiWorkerMirroredStrategy`. Received: "
                f"{type(self._strategy).__name__}, which does not support "
                "Keras 3's `fit`."
            )
        warn_if_alone()
        return 1

    @property
    def worker(self) -> int:
        """This process's number among the workers."""
        return self.workers - 1

    @property
    def has_owners(self) -> bool:
        """Whether `sum_at_owners` and `gather_from_owners` are supported."""
        return isinstance(self._strategy, tf.distribute.MirroredStrategy)

    def run(self, function: Callable, args: Sequence[Any]) -> Any:
        """Call a function on each replica of this process; return the results.

        The strategy's own `run` may treat the function as the user's step.
        """
        return tf.distribute.Strategy.run(self._strategy, function, args)

    def sum(self, values: Any) -> Any:
        """Sum the tensors and `IndexedSlices` of a nest over all replicas."""
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

    def sum_on_worker(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums of tensors over this process's replicas."""
        return self.sum(list(values))

    def gather_and_sum(self, values: Sequence[Any]) -> list[Any]:
        """Return the sums of values over all replicas.

        A value is a tensor, `IndexedSlices` or `Entries`. The sum of `Entries`
        is `IndexedSlices` with the entries of all replicas.
        """
        return self.sum(
            [v.slices() if isinstance(v, Entries) else v for v in values]
        )

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """Send row i of `rows` to replica i; return the received rows.

        `rows` and the result have the shape [count, ...]. Only groups with
        `packs_entries` support this method.
        """
        raise NotImplementedError

    def sum_at_owners(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return sums over replicas; each sum is valid only on its owner.

        Args:
            values: This replica's values.
            owners: For each value, the number of the replica that owns it.
        """

        def merged(strategy: Any, values: Any) -> list[tf.Tensor]:
            # Make one call per value: a single call for all values would sum
            # every value on every device, not only on the owner's.
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
        """Return the owner's copy of each value, on all replicas.

        Args:
            values: This replica's values.
            owners: For each value, the number of the replica that owns it.
        """

        def merged(strategy: Any, values: Any) -> list[tf.Tensor]:
            return [
                strategy.experimental_local_results(value)[owner]
                for value, owner in zip(values, owners, strict=True)
            ]

        return _merge_call(merged, values)

    def reduce_together(
        self,
        values: Sequence[Any],
        reduce: Callable[[Any], Any] | None = None,
        dtype: tf.DType | None = None,
    ) -> list[tf.Tensor]:
        """Reduce values over all replicas, and return the results.

        Values of the same dtype are sent as one tensor. Call this method
        outside of `strategy.run`.

        Args:
            values: Per-replica tensors or variables, of known shapes.
            reduce: A function that takes a per-replica tensor, and returns the
                reduced tensor. Defaults to the sum.
            dtype: The dtype that values are cast to first. Defaults to no cast.
        """
        strategy = self._strategy
        # The strategy's own `reduce` may expect the result of a step.
        reduce = reduce or functools.partial(
            tf.distribute.Strategy.reduce, strategy, "SUM", axis=None
        )
        local = [local_copies(strategy, value) for value in values]
        groups: dict[tf.DType, list[int]] = {}
        for i, (first, *_) in enumerate(local):
            groups.setdefault(dtype or first.dtype, []).append(i)
        reduced: dict[int, tf.Tensor] = {}
        for kind, group in groups.items():
            cast_and_join = functools.partial(_join, kind)
            if tf.executing_eagerly():
                own = zip(*(local[i] for i in group), strict=True)
                joined = strategy.experimental_distribute_values_from_function(
                    lambda _, join=cast_and_join, own=own: join(*next(own))
                )
            else:
                joined = self.run(cast_and_join, [values[i] for i in group])
            total = strategy.experimental_local_results(reduce(joined))[0]
            parts = split(total, [local[i][0] for i in group])
            reduced |= zip(group, parts, strict=True)
        return [reduced[i] for i in range(len(values))]

    def average(self, variables: Sequence[Any]) -> None:
        """Set variables to their means over all replicas, in one exchange.

        Call this method outside of `strategy.run`.
        """
        if self.count == 1 or not variables:
            return
        # In float64, the mean of equal float32 values is exactly that value.
        sums = self.reduce_together(variables, dtype=tf.float64)
        for variable, total in zip(variables, sums, strict=True):
            for component in local_copies(self._strategy, variable):
                component.assign(tf.cast(total / self.count, variable.dtype))

    def later(self, function: Callable[[tf.Tensor], object]) -> Any:
        """Return an object that runs a function in a thread while steps run.

        In a step, all replicas call the object's `start(local rank, argument)`.
        The thread then calls the function once, with the argument as an int64
        tensor. In a later step, all replicas call the object's
        `wait(local rank)`, which blocks until the function has returned. Only
        groups with `exchanges_later` support this method.
        """
        raise NotImplementedError

    def on_later_channel(self) -> contextlib.AbstractContextManager:
        """Return a context for exchanges in a function passed to `later`."""
        raise NotImplementedError

    def agree(
        self, subject: str, statement: Any, hint: str | None = None
    ) -> list[Any]:
        """Send a statement to all workers; return all workers' statements.

        Call this method once per worker, not once per replica. All workers must
        make the same calls in the same order.

        Args:
            subject: The subject of the statement, for errors.
            statement: This worker's value, JSON-serializable.
            hint: Advice for the error if a worker does not make the call.
        """
        return [statement]

    def alone(self, name: str) -> contextlib.AbstractContextManager:
        """Return a context in which `agree` raises if there are other workers.

        Args:
            name: The call made alone, for the error.
        """
        return contextlib.nullcontext()

    def post(self, key: str, note: str) -> None:
        """Write a note that all workers can read by its key.

        A second note under the same key raises `tf.errors.AlreadyExistsError`.
        Any thread may call this method. `post`, `read` and `check_alive` need
        several workers.
        """
        raise NotImplementedError

    def read(self, key: str, seconds: float) -> str | None:
        """Return the note posted under a key, or None after `seconds`."""
        raise NotImplementedError

    def check_alive(self) -> None:
        """Raise a `tf.errors.OpError` unless all other workers answer."""
        raise NotImplementedError

    def check_same_optimizer(
        self, optimizer: Any, variables: Sequence[Any]
    ) -> None:
        """Raise unless all workers have the same optimizer and variables.

        Later calls with the same optimizer do nothing.
        """
        warn_if_alone()


@functools.cache
def warn_if_alone() -> None:
    """Warn if `TF_CONFIG` lists several workers, but this one trains alone."""
    try:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        cluster, job = resolver.cluster_spec().as_dict(), resolver.task_type
    except (TypeError, ValueError):
        # `TF_CONFIG` is malformed, but this process may not need it.
        return
    training = "chief", "worker"  # An evaluator may run alone.
    workers = sum(len(cluster.get(name, ())) for name in training)
    # A multi-worker strategy connects the process to a cluster, which adds jobs
    # to the names of devices. Once the process has a variable, it is too late
    # to create such a strategy.
    is_connected = any(
        "/job:" in device.name for device in tf.config.list_logical_devices()
    )
    if job in training and workers > 1 and not is_connected:
        warnings.warn(
            "All workers in `TF_CONFIG` must train under one strategy. "
            f"Received: {workers} workers, but no multi-worker strategy, so "
            "each worker trains alone. Create "
            "`tfo.SparseMultiWorkerMirroredStrategy()` before anything else, "
            "and the model in its scope. If each worker is to train a separate "
            "model, remove `TF_CONFIG` from `os.environ`.",
            stacklevel=2,
        )


def replicas_of(
    strategy: tf.distribute.Strategy | None = None,
) -> ReplicaGroup:
    """Return the replicas of a strategy, by default of the current one."""
    strategy = strategy or tf.distribute.get_strategy()
    kind = getattr(strategy.extended, "replica_group", ReplicaGroup)
    return kind(strategy)


def _merge_call(merged: Any, values: Sequence[tf.Tensor]) -> Any:
    context = tf.distribute.get_replica_context()
    return context.merge_call(merged, args=(list(values),))


def _join(dtype: tf.DType, *values: Any) -> tf.Tensor:
    return join([tf.cast(value, dtype) for value in values])


def local_copies(strategy: Any, variable: Any) -> Sequence[tf.Variable]:
    """Return the copies of a variable or value in this process."""
    return strategy.experimental_local_results(backend_variable(variable))
