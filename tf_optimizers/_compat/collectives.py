"""Private names of `tf.distribute` that the strategy depends on.

They stand apart, for the optimizers to do without these modules.
"""

import itertools
import multiprocessing.pool
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    cross_device_ops,
    cross_device_utils,
    distribute_utils,
)
from tensorflow.python.ops import resource_variable_ops

from tf_optimizers._compat.coordination import joined_cluster


class CountingLauncher(cross_device_utils.CollectiveReplicaLauncher):
    """Numbers a replica's collectives by a variable, as they are run.

    Workers find each other in a collective by its number. TensorFlow's own
    takes the numbers when a `tf.function` is called, one for each collective
    in it, and cannot if that function is called inside a `tf.cond` (2.21: "You
    must feed a value for placeholder"), as Keras does for
    `steps_per_execution`.
    """

    # Far from the numbers that TensorFlow takes for its own purposes.
    _first_key = 1 << 24

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counter: Any = None

    def _next_instance_key(self) -> Any:
        if not tf.compat.v1.executing_eagerly_outside_functions():
            # A graph of TensorFlow 1 takes no variable of eager mode. It is
            # built once, and alike on all workers: numbers may be constants.
            return super()._next_instance_key()
        if self._counter is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._counter = resource_variable_ops.ResourceVariable(
                    self._first_key, trainable=False
                )
        with tf.device("CPU:0"):
            return tf.identity(self._counter.assign_add(1))

    def all_to_all(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Send every replica a row; return the rows that came.

        TensorFlow has the collective, but no launcher or strategy uses it.
        """
        options = self._options.merge(options)
        with tf.device(self._device):
            return tf.raw_ops.CollectiveAllToAllV2(
                input=tensor,
                group_size=self._group_size,
                group_key=self._group_key,
                instance_key=self._next_instance_key(),
                ordering_token=[self._get_ordering_token()],
                communication_hint=options.implementation.value.lower(),
                timeout_seconds=options.timeout_seconds,
            )


class CollectiveAllReduceHooks(cross_device_ops.CollectiveAllReduce):
    """TensorFlow's collectives between replicas, under public names.

    Subclasses implement `all_reduce`, and find the stock one in
    `all_reduce_dense`.
    """

    def __init__(
        self,
        devices: Sequence[str],
        group_size: int,
        options: Any,
        collective_keys: Any,
    ) -> None:
        super().__init__(devices, group_size, options, collective_keys)
        group_key = collective_keys.get_group_key(self._devices)
        # There is no argument for them.
        self._launchers = [
            CountingLauncher(
                group_key, group_size, collective_keys, device, options
            )
            for device in self._devices
        ]

    def _all_reduce(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value: Any,
        replica_id: int,
        options: Any,
    ) -> Any:
        # All ways into the collectives lead through here: those of replicas
        # in a graph, and those of `merge_call` and of eager mode. In the first
        # TensorFlow leaves the strategy's options out (2.21).
        options = self._options.merge(options)
        return self.all_reduce(reduce_op, value, replica_id, options)

    def all_reduce(
        self, reduce_op: Any, value: Any, replica_id: int, options: Any
    ) -> Any:
        """Reduce a nest of tensors and `IndexedSlices` over all replicas."""
        raise NotImplementedError

    def all_reduce_dense(
        self, reduce_op: Any, value: Any, replica_id: int, options: Any
    ) -> Any:
        """Reduce a list of tensors of one dtype, packed."""
        return super()._all_reduce(reduce_op, value, replica_id, options)

    def all_gather(
        self, tensor: tf.Tensor, replica_id: int, options: Any
    ) -> tf.Tensor:
        """Concatenate tensors of one shape along the first axis.

        The public `all_gather` is for tensors of different shapes, and needs
        two collectives.
        """
        return self._launchers[replica_id]._all_gather(tensor, options)

    def all_to_all(
        self, tensor: tf.Tensor, replica_id: int, options: Any
    ) -> tf.Tensor:
        """Send every replica a row of [N, ...]; return those that came."""
        return self._launchers[replica_id].all_to_all(tensor, options)

    def device(self, replica_id: int) -> str:
        """The device of a local replica; no public accessor."""
        return self._devices[replica_id]

    @property
    def replicas(self) -> int:
        """The number of replicas of all workers; no public accessor."""
        return self._group_size


_numbers = itertools.count(1)
# More than workers: the inner channel of each takes one.
_KEYS_PER_STRATEGY = 1 << 12


class MultiWorkerExtendedHooks(
    collective_all_reduce_strategy.CollectiveAllReduceExtended
):
    """The extension of `MultiWorkerMirroredStrategy`, to be adapted.

    A strategy does its work in such an object, which has no public name.
    Subclasses set `collectives`.
    """

    collectives: type[CollectiveAllReduceHooks]
    number: int  # Of the strategies of this process, in order, from 1.

    def _use_merge_call(self) -> bool:
        # Without merge calls, collectives may stand inside a `tf.cond`, and
        # gradient accumulation works.
        return False

    def _initialize_local_devices(
        self, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        # TensorFlow takes one CPU; we take every logical one. With one, the
        # two are the same.
        devices, kind = super()._initialize_local_devices(
            cluster_resolver, worker_device
        )
        if kind == "CPU":
            own = tf.DeviceSpec.from_string(worker_device)
            found = [
                tf.DeviceSpec.from_string(device.name)
                for device in tf.config.list_logical_devices("CPU")
            ]
            count = sum((d.job, d.task) == (own.job, own.task) for d in found)
            devices = tuple(
                f"{worker_device}/device:CPU:{i}" for i in range(count)
            )
        return devices, kind

    def _initialize_local(
        self, cluster_resolver: Any, devices: Any = None
    ) -> None:
        self._take_keys()
        super()._initialize_local(cluster_resolver, devices)
        self._replace_collectives()

    def _initialize_multi_worker(self, cluster_resolver: Any) -> None:
        self._take_keys()
        if joined_cluster() is not None:
            # By another strategy: its server and its watch over peers remain.
            self._std_server_started = True
            self._enable_check_health = False
        super()._initialize_multi_worker(cluster_resolver)
        self._replace_collectives()

    def _take_keys(self) -> None:
        # Every strategy of TensorFlow's starts at the same group key, so that
        # one would meet the collectives of another.
        self.number = next(_numbers)
        self._collective_key_base += self.number * _KEYS_PER_STRATEGY

    def _replace_collectives(self) -> None:
        # There is no argument for them.
        self._cross_device_ops = self._make_collectives(
            self._collective_keys, self.replicas
        )
        # Far from the keys of all strategies' own collectives.
        key = self._collective_key_base + (1 << 24)
        self._side_channel = self._make_collectives(
            cross_device_utils.CollectiveKeys(group_key_start=key),
            self.replicas,
        )
        # Groups of different devices need keys of their own.
        key = self._collective_key_base + (1 << 25) + self.worker_index
        self._worker_channel = self._make_collectives(
            cross_device_utils.CollectiveKeys(group_key_start=key),
            len(self.worker_devices),
        )

    def _make_collectives(
        self, keys: Any, replicas: int
    ) -> CollectiveAllReduceHooks:
        return self.collectives(
            devices=self.worker_devices,
            group_size=replicas,
            options=self._communication_options,
            collective_keys=keys,
        )

    def reduce_beside(self, reduce_op: Any, value: Any) -> Any:
        """Reduce over all replicas, without waiting for other collectives.

        TensorFlow runs those of one group of devices one after another, and
        has no public way to form a second group.
        """
        return self._side_channel.reduce(
            tf.distribute.ReduceOp(reduce_op), value, destinations=value
        )

    def in_replica(self, method: Callable, *args: Any) -> Any:
        """Return `method(*args, local rank, options)` of the replica that asks.

        Args:
            method: Of the collectives of some channel.
            *args: Nests, in which tensors are this replica's.
        """
        context = tf.distribute.get_replica_context()
        options = self._communication_options
        count = len(self.worker_devices)
        if not tf.executing_eagerly():
            rank = tf.get_static_value(context.replica_id_in_sync_group) % count
            return method(*args, rank, options)

        # Replicas take turns then: one that waits, waits for ever.
        def call_all(strategy: Any, args: Any) -> Any:
            def call(rank: int) -> Any:
                own = distribute_utils.select_replica(rank, args)
                return method(*own, rank, options)

            with multiprocessing.pool.ThreadPool(count) as pool:
                results = pool.map(call, range(count))
            return distribute_utils.regroup(tuple(results))

        return context.merge_call(call_all, args=(args,))

    def sum_on_worker(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sum tensors over the replicas of this process, in each of them.

        A replica's public `all_reduce` is over those of all workers.

        Args:
            values: This replica's, of one dtype.
        """
        total = tf.distribute.ReduceOp.SUM
        return self.in_replica(
            self._worker_channel.all_reduce, total, list(values)
        )

    @property
    def channel(self) -> CollectiveAllReduceHooks:
        """The collectives of all replicas; no public accessor."""
        return self._cross_device_ops

    @property
    def replicas(self) -> int:
        """The number of replicas of all workers."""
        return self._num_replicas_in_sync

    @property
    def workers(self) -> int:
        """The number of worker processes; no public accessor."""
        return self._num_workers

    @property
    def worker_index(self) -> int:
        """This process's rank among them, the chief's being 0."""
        return self._id_in_cluster

    @property
    def tasks(self) -> list[str]:
        """TensorFlow's names of them; no public accessor."""
        cluster = self._cluster_spec
        return [
            f"/job:{job}/replica:0/task:{task}"
            for job in ("chief", "worker")
            if job in cluster.jobs
            for task in cluster.task_indices(job)
        ]
