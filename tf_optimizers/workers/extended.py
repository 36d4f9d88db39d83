"""The devices and collectives of `SparseMultiWorkerMirroredStrategy`."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.workers._compat.coordination import joined_cluster
from tf_optimizers.workers._compat.distribution import (
    CollectiveKeys,
    regroup,
    select_replica,
)
from tf_optimizers.workers.collectives.ahead import AheadCollectives
from tf_optimizers.workers.collectives.all_reduce import (
    SparseCollectiveAllReduce,
)
from tf_optimizers.workers.collectives.later import (
    Current,
    GatherLater,
    Later,
)
from tf_optimizers.workers.collectives.launcher import ranks_in
from tf_optimizers.workers.collectives.progress import is_in_run
from tf_optimizers.workers.collectives.runs import (
    BackgroundCall,
    in_every_replica,
)
from tf_optimizers.workers.collectives.variables import VariablesExtended
from tf_optimizers.workers.steps.noted_exchanges import NotedCollectives
from tf_optimizers.workers.worker_replicas import WorkerReplicas

_numbers = itertools.count(1)
# TensorFlow identifies a group of devices by a number, the group key. Each
# strategy reserves this many keys. It needs one for each worker's
# `worker_channel`, and two for each pair (sender, receiver) in `ahead.py`.
_KEYS_PER_STRATEGY = 1 << 13
# By default, TensorFlow (2.21) sends messages in chunks of 4 KiB, which is slow
# for messages of many MiB. Chunks above 32 KiB are slow for messages of 1 MiB.
RPC_CHUNK_BYTES = 1 << 15
_RING = tf.distribute.experimental.CommunicationOptions(implementation="RING")


class SparseExtended(VariablesExtended):
    """The `strategy.extended` of `SparseMultiWorkerMirroredStrategy`.

    TensorFlow calls this object to create variables, run replicas and reduce
    values.

    Attributes:
        replica_group: The class of the object that `replicas_of` returns.
        number: The strategy's number, counted from 1 in each process.
        channels: The objects that run collectives between workers. Each channel
            runs its collectives one after another. `later` adds more channels.
    """

    replica_group = WorkerReplicas
    number: int
    channels: list[SparseCollectiveAllReduce]

    @property
    def timeout_seconds(self) -> float | None:
        """The longest wait of a collective, in seconds; None if unlimited."""
        return self._communication_options.timeout_seconds

    def _use_merge_call(self) -> bool:
        # Without merge calls, collectives are possible inside a `tf.cond`, and
        # gradient accumulation works.
        return False

    def _initialize_local_devices(
        self, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        # TensorFlow uses only one CPU; we use all logical CPUs.
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
            # This process's first strategy has started the server and the
            # health checks.
            self._std_server_started = True
            self._enable_check_health = False
        super()._initialize_multi_worker(cluster_resolver)
        self._replace_collectives()

    def _update_config_proto(self, config_proto: Any) -> Any:
        # Only the config of TensorFlow's server can set the chunk size.
        config = super()._update_config_proto(config_proto)
        config.experimental.recv_buf_max_chunk = RPC_CHUNK_BYTES
        return config

    def _take_keys(self) -> None:
        # By default, all strategies begin at the same group key, and would mix
        # up their collectives.
        self.number = next(_numbers)
        self._collective_key_base += self.number * _KEYS_PER_STRATEGY

    def _replace_collectives(self) -> None:
        # The parent's constructor has no argument for collectives.
        self._cross_device_ops = self._make_collectives(
            self._collective_keys, self.replicas, kind=NotedCollectives
        )
        # These keys are far above the keys of any strategy's main collectives.
        far = self._collective_key_base + (1 << 24)
        # Use a ring: NCCL may deadlock if two groups that share GPUs run
        # collectives at the same time.
        self._side_channel, self._input_channel = (
            self._make_collectives(
                CollectiveKeys(group_key_start=key), self.replicas, _RING
            )
            for key in (far, far + (3 << 24))
        )
        self.channels = [
            self._cross_device_ops,
            self._side_channel,
            self._input_channel,
        ]
        # Groups of different devices need different keys.
        key = far + (1 << 24) + self.worker_index
        self.worker_channel = self._make_collectives(
            CollectiveKeys(group_key_start=key), len(self.worker_devices)
        )

    def _make_collectives(
        self,
        keys: Any,
        replicas: int,
        options: Any = None,
        kind: type = SparseCollectiveAllReduce,
    ) -> SparseCollectiveAllReduce:
        count = len(self.worker_devices)
        is_local = replicas == count
        return kind(
            devices=self.worker_devices,
            group_size=replicas,
            options=self._communication_options.merge(options),
            collective_keys=keys,
            ranks=range(count) if is_local else ranks_in(self.tasks, count),
            first_replica=0 if is_local else self.worker_index * count,
        )

    def reduce_in_parallel(self, reduce_op: Any, value: Any) -> Any:
        """Reduce a value over all replicas, on the side channel.

        Collectives of one channel run one after another. In a `tf.function`,
        different channels can run in parallel.
        """
        return self._side_channel.reduce(
            tf.distribute.ReduceOp(reduce_op), value, destinations=value
        )

    def summarize_notes(
        self,
        summarize: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
        notes: Sequence[tf.Tensor],
        before: tf.Tensor,
        is_in_step: bool = True,
    ) -> tf.Tensor:
        """Exchange the replicas' notes on batches; return a summary.

        A note is a vector of numbers that describes one replica's part of a
        batch.

        Args:
            summarize: Called with the stacked notes of all replicas and with
                `before`. Returns the summary.
            notes: For each replica of this worker, the note on one batch, or
                the stacked notes on several batches.
            before: The previous summary.
            is_in_step: Whether all workers exchange the notes in the same step.
        """
        # With `steps_per_execution`, a graph has a loop of steps. TensorFlow
        # matches only collectives of the same iteration, unless a function that
        # is not inlined runs them.
        if tf.executing_eagerly() or not is_in_step:
            return self._summarize_in_function(summarize, list(notes), before)
        return self._summarize(summarize, list(notes), before)

    @functools.cached_property
    def _summarize_in_function(self) -> Callable:
        """`_summarize` as a `tf.function` that is not inlined."""
        return tf.function(
            self._summarize,
            autograph=False,
            experimental_attributes={"_noinline": True},
        )

    def _summarize(
        self, summarize: Callable, notes: list[tf.Tensor], before: tf.Tensor
    ) -> tf.Tensor:
        if self.workers == 1:
            return summarize(tf.stack(notes), before)
        # The step uses the main channel and the side channel. On a third
        # channel, this exchange can run in parallel with the step.
        return summarize(self.gather_copies(self._input_channel, notes), before)

    def gather_notes(self, note: tf.Tensor) -> tf.Tensor:
        """Gather notes on a batch; return the notes of all replicas, stacked.

        All replicas of this worker send the same note. The step waits for the
        notes, so the gather can use the main channel.
        """
        return self.gather_copies(
            self.channel, [note] * len(self.worker_devices)
        )

    def gather_copies(
        self, channel: Any, copies: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Gather a tensor from each replica; return all of them, stacked.

        `copies` contains a tensor for each replica of this worker. The tensors
        of all workers must have the same shape.
        """

        def gather(rank: int) -> tf.Tensor:
            row = copies[rank][tf.newaxis]
            return channel.all_gather(row, rank)

        gathered = in_every_replica(gather, len(copies))
        if tf.executing_eagerly():
            return gathered[0]
        # Wait for the gathers of all local replicas. Otherwise, a failed check
        # of the result would cancel the other local gathers, and other workers
        # would wait for these gathers forever.
        with tf.control_dependencies(gathered):
            return tf.identity(gathered[0])

    @functools.cached_property
    def background(self) -> BackgroundCall:
        """Runs exchanges of notes on batches in eager mode."""
        return BackgroundCall(self, is_at_once=self.workers == 1)

    def check_step_ended(self) -> None:
        """Record that this worker has failed, if its last step has not ended.

        Call this method only between steps.
        """
        if any(map(is_in_run, self.channel.progress())):
            self.channel.enter()

    def in_replica(self, method: Callable, *args: Any) -> Any:
        """Run a collective from replica context, and return its result.

        Args:
            method: A channel's method. Called once for each local replica, as
                `method(*args, rank)`, with the replica's local rank.
            *args: Nests of the calling replica's tensors.
        """
        context = tf.distribute.get_replica_context()
        count = len(self.worker_devices)
        if not tf.executing_eagerly():
            rank = tf.get_static_value(context.replica_id_in_sync_group) % count
            return method(*args, rank)

        def call_all(strategy: Any, args: Any) -> Any:
            def call(rank: int) -> Any:
                own = select_replica(rank, args)
                return method(*own, rank)

            results = in_every_replica(call, count)
            return regroup(tuple(results))

        return context.merge_call(call_all, args=(args,))

    @functools.cached_property
    def later(self) -> dict[str, Later]:
        """For each purpose, a thread that exchanges values while steps run.

        The purposes are "entries", "logs" and "notes". Each thread has its own
        channel, so no thread waits for another.
        """
        threads = {}
        for i, purpose in enumerate(("entries", "logs", "notes")):
            keys = CollectiveKeys(self._collective_key_base + (5 + i << 24))
            # On GPUs, use a ring instead of NCCL, as for the side channel.
            channel = self._make_collectives(
                keys, self.replicas, _RING, AheadCollectives
            )
            self.channels.append(channel)
            threads[purpose] = Later(self, channel)
        return threads

    @functools.cached_property
    def notes_later(self) -> Callable[[tuple[int, ...]], GatherLater]:
        """A function that returns a `GatherLater` for notes of a given shape.

        A `GatherLater` exchanges notes while the next steps run. Calls with the
        same shape return the same object.
        """
        return functools.cache(
            lambda shape: GatherLater(self, "notes", shape, tf.int32)
        )

    @functools.cached_property
    def current(self) -> Current:
        """The thread-local channel that replaces the main channel, if set."""
        return Current()

    @property
    def channel(self) -> SparseCollectiveAllReduce:
        """The channel that this thread uses, by default the main channel."""
        return self.current.channel or self._cross_device_ops

    @property
    def replicas(self) -> int:
        """The number of replicas of all workers."""
        return len(self.worker_devices) * self.workers

    @property
    def workers(self) -> int:
        """The number of worker processes."""
        return self._num_workers

    @property
    def worker_index(self) -> int:
        """This process's index among the workers; the chief has index 0."""
        return self._id_in_cluster

    @property
    def tasks(self) -> list[str]:
        """The workers' names, such as "/job:worker/replica:0/task:1"."""
        cluster = self._cluster_spec
        return [
            f"/job:{job}/replica:0/task:{task}"
            for job in ("chief", "worker")
            if job in cluster.jobs
            for task in cluster.task_indices(job)
        ]
