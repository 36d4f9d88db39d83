"""Exchanges the values of optimizers between the replicas of all workers.

An optimizer such as `ShardedState` assigns each value to one replica, the
value's owner. Replicas send gradients to the owners in messages. A message has
one row per owner, and all rows are padded to the longest row:

    replica 0   [a b | c .]   ─ all-to-all ─▶   0: sums of a b
    replica 1   [a b | c .]                     1: sums of c .

After an owner has updated its values, it sends a row of new values to all
replicas. A message has one dtype, and at most `LARGEST_MESSAGE` bytes.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_optimizers._compat.keras_internals import has_hooks
from tf_optimizers.replicas import ReplicaGroup, replicas_of
from tf_optimizers.workers._compat import coordination
from tf_optimizers.workers.agreement.same_training import check_same_optimizer
from tf_optimizers.workers.agreement.statements import (
    ANSWERING_SECONDS,
    START_THE_SAME,
    acting_alone,
    gather_statements,
)
from tf_optimizers.workers.collectives.bits import from_numbers, to_numbers
from tf_optimizers.workers.collectives.later import Call
from tf_optimizers.wrapped import wrapped_optimizers

# The largest size of a message, in bytes. Larger messages would be slower,
# since the operating system clears their memory each time. Smaller messages
# would take more round trips.
LARGEST_MESSAGE = 1 << 24


class WorkerReplicas(ReplicaGroup):
    """The replicas of a `SparseMultiWorkerMirroredStrategy`."""

    packs_entries = averages_statistics = has_owners = exchanges_later = True

    @property
    def workers(self) -> int:
        """The number of worker processes."""
        return self._strategy.extended.workers

    @property
    def worker(self) -> int:
        """This process's index among the workers."""
        return self._strategy.extended.worker_index

    def sum_on_worker(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return each value's sum over this process's replicas."""
        extended = self._strategy.extended
        return extended.in_replica(
            extended.worker_channel.gather_and_reduce, list(values)
        )

    def gather_and_sum(self, values: Sequence[Any]) -> list[Any]:
        """Return each value's sum over all replicas.

        The sum of `Entries` is `IndexedSlices` with the entries of all
        replicas.
        """
        extended = self._strategy.extended
        return extended.in_replica(
            extended.channel.gather_and_reduce, list(values)
        )

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """Send row i of `rows` to replica i; return the received rows.

        `rows` and the result have the shape [replicas, ...].
        """
        extended = self._strategy.extended
        return extended.in_replica(extended.channel.all_to_all, rows)

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Concatenate the rows of all replicas.

        All replicas must pass tensors of the same shape.
        """
        extended = self._strategy.extended
        return extended.in_replica(extended.channel.all_gather, rows)

    def sum_at_owners(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return each value's sum over replicas, valid only on its owner."""

        def send(message: Message) -> list[tuple[list[Range], tf.Tensor]]:
            numbers = to_numbers(_rows(message, message.rows, values))
            received = from_numbers(self.all_to_all(numbers), message.dtype)
            total = tf.add_n(tf.unstack(received, num=self.count))
            return [(message.rows[self.rank], total)]

        return self._send_all(send, values, owners)

    def gather_from_owners(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return the owner's copy of each value, on all replicas."""

        def send(message: Message) -> list[tuple[list[Range], tf.Tensor]]:
            own = message.rows[self.rank]
            numbers = self.gather(to_numbers(_rows(message, [own], values)))
            received = from_numbers(numbers, message.dtype)
            rows = tf.unstack(received, num=self.count)
            return list(zip(message.rows, rows, strict=True))

        return self._send_all(send, values, owners)

    def _send_all(
        self,
        send: Callable[["Message"], list[tuple[list["Range"], tf.Tensor]]],
        values: Sequence[tf.Tensor],
        owners: Sequence[int],
    ) -> list[tf.Tensor]:
        """Send all messages, and return the received values.

        Values that this replica does not receive are returned unchanged.

        Args:
            send: Called with each message. Returns a pair for each received
                row: the list of ranges in the row, and the row itself.
            values: This replica's values.
            owners: The owner of each value.
        """
        ranges_of: dict[int, list[tf.Tensor]] = {}
        last: list[list[tf.Tensor]] = [[], []]
        for message in messages(values, owners, self.count):
            # Send at most two messages at the same time, to limit memory.
            with tf.control_dependencies(last[-2]):
                received = send(message)
            last.append([row for _, row in received])
            for ranges, row in received:
                ends = itertools.accumulate(each.size for each in ranges)
                for each, end in zip(ranges, ends, strict=True):
                    ranges_of.setdefault(each.position, []).append(
                        row[end - each.size : end]
                    )
        return [
            tf.reshape(_joined(ranges_of[i]), value.shape)
            if i in ranges_of
            else value
            for i, value in enumerate(values)
        ]

    def later(self, function: Callable[[tf.Tensor], object]) -> Call:
        """Return a `Call` that runs a function in a thread while steps run."""
        extended = self._strategy.extended
        local = len(extended.worker_devices)
        return extended.later["entries"].call(function, local)

    def on_later_channel(self) -> contextlib.AbstractContextManager:
        """Return a context whose exchanges use the channel of `later`."""
        extended = self._strategy.extended
        return extended.current.set(channel=extended.later["entries"].channel)

    def agree(
        self, subject: str, statement: Any, hint: str | None = None
    ) -> list[Any]:
        """Send a statement to all workers; return every worker's statement."""
        return gather_statements(
            self._strategy, subject, statement, hint or START_THE_SAME
        )

    def alone(self, name: str) -> contextlib.AbstractContextManager:
        """Return a context in which `agree` raises, if there are other workers.

        Args:
            name: The call that this worker makes alone, for the error message.
        """
        return acting_alone(name)

    def post(self, key: str, note: str) -> None:
        """Write a note that all workers can read by its key."""
        coordination.write(f"tf_optimizers/{key}", note)

    def read(self, key: str, seconds: float) -> str | None:
        """Return a key's note, or None if none is posted within `seconds`."""
        return coordination.read(f"tf_optimizers/{key}", seconds)

    def check_alive(self) -> None:
        """Raise a `tf.errors.OpError` unless all other workers answer."""
        for worker, task in enumerate(self._strategy.extended.tasks):
            if worker != self.worker:
                coordination.check_alive(task, ANSWERING_SECONDS)

    def check_same_optimizer(
        self, optimizer: Any, variables: Sequence[Any]
    ) -> None:
        """Raise unless all workers have the same optimizer and variables.

        Later calls with the same optimizer compare nothing.
        """
        compared = self._strategy.compared_optimizers
        if optimizer not in compared:
            check_same_optimizer(self._strategy, optimizer, variables)
            # The weights and steps of wrapped optimizers have been compared,
            # too, but perhaps not their settings. So if a `LossScaleOptimizer`
            # or a `MultiOptimizer` wraps one of our optimizers, our optimizer
            # is compared again in its first step.
            inner = wrapped_optimizers(optimizer)[1:]
            compared.add(optimizer)
            compared.update(each for each in inner if not has_hooks(each))


def is_ours(strategy: tf.distribute.Strategy) -> bool:
    """Return whether a strategy is a `SparseMultiWorkerMirroredStrategy`."""
    return isinstance(replicas_of(strategy), WorkerReplicas)


def strategy_of_replica() -> Any:
    """Return the calling replica's strategy if it is ours, else None."""
    context = tf.distribute.get_replica_context()
    is_known = context is not None and is_ours(context.strategy)
    return context.strategy if is_known else None


class Range(NamedTuple):
    """A range of elements of a flattened value.

    Attributes:
        position: The index of the value among the exchanged values.
        start: The index of the first element.
        stop: The index after the last element.
    """

    position: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


class Message(NamedTuple):
    """Values to exchange in one message.

    Attributes:
        dtype: The dtype of the values.
        rows: One row per replica: the ranges in this message that the replica
            owns.
        length: The number of elements to which each row is padded.
    """

    dtype: tf.DType
    rows: list[list[Range]]
    length: int


def messages(
    values: Sequence[Any], owners: Sequence[int], replicas: int
) -> list[Message]:
    """Divide values into the messages that go to or from their owners."""
    found = []
    for dtype in dict.fromkeys(value.dtype for value in values):
        most = LARGEST_MESSAGE // (replicas * dtype.size)
        owned: list[list[tuple[int, int]]] = [[] for _ in range(replicas)]
        for i, value in enumerate(values):
            if value.dtype == dtype:
                owned[owners[i]].append((i, value.shape.num_elements()))
        cut = [_cut(sizes, most) for sizes in owned]
        for rows in itertools.zip_longest(*cut, fillvalue=[]):
            length = max(sum(each.size for each in row) for row in rows)
            found.append(Message(dtype, list(rows), length))
    return found


def _cut(sizes: Sequence[tuple[int, int]], most: int) -> list[list[Range]]:
    """Cut values into ranges, and fill rows with the ranges.

    Args:
        sizes: For each value, its position and its number of elements.
        most: The largest number of elements in a row.
    """
    rows: list[list[Range]] = []
    room = 0
    for position, size in sizes:
        start = 0
        while start < size:
            if not room:
                rows.append([])
                room = most
            stop = min(start + room, size)
            rows[-1].append(Range(position, start, stop))
            room -= stop - start
            start = stop
    return rows


def _rows(
    message: Message, rows: Sequence[list[Range]], values: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Return some rows of a message as a matrix, padded with zeros."""
    flat = []
    for row in rows:
        flat += [
            _flat(values[each.position])[each.start : each.stop] for each in row
        ]
        gap = message.length - sum(each.size for each in row)
        flat.append(tf.zeros([gap], message.dtype))
    return tf.reshape(tf.concat(flat, 0), [len(rows), message.length])


def _joined(ranges: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate the ranges of a value, in new memory.

    If a variable were assigned a slice of a message, the whole message would
    stay in memory.
    """
    return tf.concat([*ranges, tf.zeros([0], ranges[0].dtype)], 0)


def _flat(value: tf.Tensor) -> tf.Tensor:
    # The graph optimizer of TensorFlow (2.21) sometimes mistakes one variable's
    # shape for another's, and removes a reshape to that shape. Hardly any
    # variable has the shape [1, 1, n, 1, 1]. The slice copies nothing.
    size = value.shape.num_elements()
    return tf.reshape(value, [1, 1, size, 1, 1])[0, 0, :, 0, 0]
