"""Runs a replica's collectives, in few rounds and under fixed keys.

On CPUs, TensorFlow gathers and sums in a ring. With N replicas, a gather takes
N - 1 rounds, and a sum twice as many. But TensorFlow's all-to-all sends all
messages at once. So three or more replicas gather and sum by all-to-all, if
each process has at most ten replicas. A gather then takes one round, and a sum
takes two, for the same number of bytes.

With `FEWEST_IN_LEVELS` or more replicas, this would take too many messages. So
unless N is prime, they gather in two levels: first within a group of neighbors,
then with one replica of every other group.

Workers that begin different collectives wait for each other forever. So each
replica records its progress, which `watchdog.py` compares between workers.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_optimizers.workers._compat.distribution import CollectiveReplicaLauncher
from tf_optimizers.workers.collectives.progress import (
    ALL_TO_ALL,
    GATHER,
    REDUCE,
    Progress,
    instance_key,
    kind_number,
    lone_key,
)

# Replicas gather and sum by all-to-all only if a process has at most this many
# replicas. TensorFlow (2.21) names a message by both ranks, without a
# separator, so that "from 1 to 11" and "from 11 to 1" have the same name. If
# both replicas are in one process, TensorFlow fails or mixes up the messages.
_LOCAL_REPLICAS_AT_ONCE = 10

# With this many replicas or more, a second round costs less than the messages
# that it saves, even if a round takes 20 ms; see docs/benchmarks.md.
FEWEST_IN_LEVELS = 64
# Offsets of group keys. They must be larger than the keys in `extended.py`.
_NEAR_KEYS, _FAR_KEYS = 1 << 27, 1 << 28


class Group(NamedTuple):
    """A group of replicas that exchange values with each other."""

    key: int
    size: int


def levels(everyone: Group, rank: int) -> list[Group]:
    """Return the groups in which a replica gathers by all-to-all, in order.

    Fewer than `FEWEST_IN_LEVELS` replicas, or a prime number of replicas,
    gather in one group. Otherwise, a replica gathers in two groups. The size of
    the first group is the largest divisor of N up to sqrt(N), where N is the
    number of replicas.

    Args:
        everyone: All replicas.
        rank: The replica's rank among all replicas, in TensorFlow's order.
    """
    key, size = everyone
    near = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    if size < FEWEST_IN_LEVELS or near == 1:
        return [everyone]
    group, place = divmod(rank, near)
    return [
        Group(key + _NEAR_KEYS + group, near),
        Group(key + _FAR_KEYS + place, size // near),
    ]


def ranks_in(tasks: Sequence[str], devices: int) -> list[int]:
    """Return every replica's place in the result of a collective.

    TensorFlow (2.21) sorts workers by name, so that task:10 comes before
    task:2. The devices of a worker are sorted by number.

    Args:
        tasks: The names of all workers.
        devices: The number of devices of each worker.
    """
    places = {task: place for place, task in enumerate(sorted(tasks))}
    return [
        places[task] * devices + device
        for task in tasks
        for device in range(devices)
    ]


class KeyedLauncher(CollectiveReplicaLauncher):
    """Runs a replica's collectives under fixed keys.

    Args:
        *args: The arguments of TensorFlow's launcher.
        local_replicas: The number of replicas in this process.
        ranks: The place of each replica in the result of a collective.
        replica: The index of this replica in `ranks`.
    """

    def __init__(
        self,
        *args: Any,
        local_replicas: int,
        ranks: Sequence[int],
        replica: int,
    ) -> None:
        super().__init__(*args)
        self._everyone = Group(self._group_key, self._group_size)
        self._rank = ranks[replica]
        self._levels = levels(self._everyone, self._rank)
        self._ranks = list(ranks)
        self._has_all_to_all = local_replicas <= _LOCAL_REPLICAS_AT_ONCE
        self._sends_at_once = (
            "CPU" in self._device
            # With two replicas, TensorFlow's ring takes as few rounds.
            and self._group_size > 2
            and self._has_all_to_all
        )
        self.progress = Progress(
            self._device, is_guarded=self._group_size > local_replicas
        )

    def all_reduce(
        self, input_tensor: Any, control_input: Any = None, options: Any = None
    ) -> tf.Tensor:
        """Sum a tensor over all replicas."""
        tensor = tf.convert_to_tensor(input_tensor)
        flat = tf.reshape(tensor, [-1])
        with self._control_input(control_input):
            if self._sends_at_once:
                total = self._sum_by_shards(flat, options)
            else:
                total = self._run(
                    REDUCE,
                    flat,
                    (REDUCE, _elements(flat), 0),
                    options,
                    merge_op="Add",
                    final_op="Id",
                )
        return tf.reshape(total, _shape(tensor))

    def _all_gather(self, input_tensor: Any, options: Any) -> tf.Tensor:
        # All of TensorFlow's own gathers call this method.
        return self.gather(input_tensor, options)

    def gather(
        self, input_tensor: Any, options: Any, layout: int = 0
    ) -> tf.Tensor:
        """Concatenate the replicas' tensors along the first axis.

        The tensors must have the same shape. For `layout`, see `instance_key`.
        """
        tensor = tf.convert_to_tensor(input_tensor)
        shape, flat = _shape(tensor), tf.reshape(tensor, [-1])
        size = _elements(flat)
        may_be_empty = tf.is_tensor(size) or size == 0
        if may_be_empty:
            # TensorFlow (2.21) crashes in a gather without elements.
            flat = tf.pad(flat, [[0, tf.cast(tf.equal(size, 0), tf.int32)]])
        if self._sends_at_once:
            gathered = self._gather_at_once(flat, options, layout)
        else:
            signature = GATHER, _elements(flat), layout
            gathered = self._run(GATHER, flat, signature, options)
        shape = tf.concat([[self._group_size * shape[0]], shape[1:]], 0)
        if may_be_empty:
            gathered = gathered[: self._group_size * size]
        return tf.reshape(self._in_order(gathered, self._ranks), shape)

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        """Send row i to replica i; return received rows in replica order."""
        size, by_rank = self._group_size, np.argsort(self._ranks).tolist()
        if not self._has_all_to_all:
            every = tf.reshape(self.gather(tensor, None), [size, size, -1])
            own = every[:, self._ranks.index(self._rank)]
            return tf.reshape(own, _shape(tensor))
        rows = tf.reshape(tensor, [size, -1])
        signature = ALL_TO_ALL, _elements(rows), 0
        rows = self._in_order(rows, by_rank)
        received = self._run(ALL_TO_ALL, rows, signature, options=None)
        received = self._in_order(received, self._ranks)
        return tf.reshape(received, _shape(tensor))

    def _in_order(self, rows: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
        """Return rows of equal length in another order, as a matrix.

        If `order` is sorted, return `rows` itself.
        """
        if order == sorted(order):  # True for up to ten workers.
            return rows
        return tf.gather(tf.reshape(rows, [self._group_size, -1]), order)

    def _gather_at_once(
        self, flat: tf.Tensor, options: Any, layout: int = 0
    ) -> tf.Tensor:
        """Gather a vector by all-to-all, in one round per group."""
        for group in self._levels:
            received = self._run(
                ALL_TO_ALL,
                tf.tile(flat[tf.newaxis], [group.size, 1]),
                (GATHER, _elements(flat), layout),
                options,
                group,
                name="gather_at_once",
            )
            flat = tf.reshape(received, [-1])
        return flat

    def _sum_by_shards(self, flat: tf.Tensor, options: Any) -> tf.Tensor:
        """Sum a vector over replicas.

        Each replica receives one part of every vector, and adds these parts by
        `tf.add_n`. Then the replicas gather the sums.
        """
        size, count = _elements(flat), self._group_size
        each = -(-size // count)
        # TensorFlow (2.21) crashes in an exchange without elements.
        each = tf.maximum(each, 1) if tf.is_tensor(each) else max(each, 1)
        rows = tf.pad(flat, [[0, each * count - size]])
        rows = tf.reshape(rows, [count, each])
        signature = REDUCE, size, 0
        received = self._run(
            ALL_TO_ALL, rows, signature, options, name="sum_by_shards"
        )
        own = tf.add_n(tf.unstack(received, num=count))
        return self._gather_at_once(own, options)[:size]

    def _run(
        self,
        operation: str,
        tensor: tf.Tensor,
        signature: tuple[str, Any, int],
        options: Any,
        replicas: Group | None = None,
        **attributes: str,
    ) -> tf.Tensor:
        """Run one of TensorFlow's collective operations.

        The signature contains the purpose (gather, reduce or all-to-all), the
        number of elements and the layout. They are recorded as progress and,
        with the dtype, determine the key. The purpose may differ from
        `operation`: a gather may run as an all-to-all. Within a group, tensors
        with equal signatures must have equal shapes.
        """
        options = self._options.merge(options)
        replicas = replicas or self._everyone
        with tf.device(self._device):
            whole, elements, layout = signature
            # If the input raises an error, for example at the end of data, the
            # collective must not count as begun.
            with tf.control_dependencies([tensor]):
                kind = kind_number(whole, tensor.dtype)
                key = self._begin(kind, elements, layout)
            received = getattr(tf.raw_ops, operation)(
                input=tensor,
                group_size=replicas.size,
                group_key=replicas.key,
                instance_key=key,
                ordering_token=[self.progress.token],
                communication_hint=options.implementation.value.lower(),
                timeout_seconds=self._timeout(options),
                **attributes,
            )
            self.progress.end()
            return received

    def _timeout(self, options: Any) -> float | None:
        """Return the seconds after which TensorFlow ends a collective.

        Return None if `watchdog.py` enforces the strategy's timeout instead.
        If TensorFlow (2.21) ends a collective after a timeout, it frees memory
        that is still in use, and the process may crash. TensorFlow also keeps a
        thread for each timeout.
        """
        seconds = options.timeout_seconds
        is_usual = seconds == self._options.timeout_seconds
        return None if self.progress.is_guarded and is_usual else seconds

    def _begin(self, kind: int, elements: Any, layout: int) -> tf.Tensor:
        """Record that a collective begins; return its key."""
        may_begin = self.progress.begin(kind, elements, layout)
        with tf.device("CPU:0"):
            key = instance_key(kind, elements, layout)
            if self.progress.is_guarded:
                # If the replica has failed, the lone key makes the collective
                # wait until `watchdog.py` ends it. Do not use an assertion:
                # TensorFlow would make one replica's assertions wait for those
                # of another replica.
                key = tf.where(may_begin, key, lone_key(self._rank))
            return tf.convert_to_tensor(key, tf.int32)


def _elements(tensor: tf.Tensor) -> Any:
    known = tensor.shape.num_elements()
    return tf.size(tensor, tf.int64) if known is None else known


def _shape(tensor: tf.Tensor) -> Any:
    is_known = tensor.shape.is_fully_defined()
    return tensor.shape if is_known else tf.shape(tensor)
