"""Sends gradients to owners, and their new weights to all replicas."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_optimizers.kernels import norm
from tf_optimizers.replicas import is_sparse_multi_worker, rank_among

# Larger ones take longer, since the system clears such memory each time, and
# smaller ones take more round trips.
MESSAGE_BYTES = 1 << 24


class Merged:
    """The exchange of replicas of one process, as `MirroredStrategy` has."""

    def sum_at_owners(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return the sums over replicas; those of others mean nothing."""

        def merged(strategy: Any, values: Any) -> list[tf.Tensor]:
            devices = strategy.extended.worker_devices
            # One by one: several together are summed on all devices.
            sums = [
                strategy.extended.reduce_to(
                    tf.distribute.ReduceOp.SUM, value, devices[owner]
                )
                for value, owner in zip(values, owners, strict=True)
            ]
            return [strategy.experimental_local_results(s)[0] for s in sums]

        return _merge_call(merged, list(values))

    def gather(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return what the owners have of values that all replicas have."""

        def merged(strategy: Any, values: Any) -> list[tf.Tensor]:
            return [
                strategy.experimental_local_results(value)[owner]
                for value, owner in zip(values, owners, strict=True)
            ]

        return _merge_call(merged, list(values))


class Part(NamedTuple):
    """Some elements of a value, which are counted flat."""

    position: int  # Of the value.
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many there are."""
        return self.stop - self.start


class Message(NamedTuple):
    """What travels at once: of each replica, some of what it owns."""

    dtype: tf.DType
    rows: list[list[Part]]  # Filled up to one length.
    length: int


class AllToAll:
    """The exchange under `SparseMultiWorkerMirroredStrategy`.

    Each replica has a row of what it owns, filled up to the longest:

        replica 0   [a b | c .]   ─ all-to-all ─▶   0: sums of a b
        replica 1   [a b | c .]                   1: sums of c .

    and all-gathers its row of new weights. Values of several dtypes, and more
    than `MESSAGE_BYTES`, take several messages.

    Args:
        places: Of each replica, that in what a collective returns.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self._places = list(places)

    def sum_at_owners(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return the sums over replicas; those of others mean nothing."""
        extended = tf.distribute.get_strategy().extended
        own = self._places[rank_among(len(self._places))]

        def send(message: Message) -> list[tuple[list[Part], tf.Tensor]]:
            words = _as_words(_rows(message, message.rows, values))
            received = _from_words(extended.all_to_all(words), message.dtype)
            total = tf.add_n(tf.unstack(received, num=len(self._places)))
            return [(message.rows[own], total)]

        return self._exchange(send, values, owners)

    def gather(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return what the owners have of values that all replicas have."""
        extended = tf.distribute.get_strategy().extended
        own = self._places[rank_among(len(self._places))]

        def send(message: Message) -> list[tuple[list[Part], tf.Tensor]]:
            words = _as_words(_rows(message, [message.rows[own]], values))
            words = extended.in_replica(extended.channel.all_gather, words)
            received = _from_words(words, message.dtype)
            rows = tf.unstack(received, num=len(self._places))
            return list(zip(message.rows, rows, strict=True))

        return self._exchange(send, values, owners)

    def _exchange(
        self,
        send: Callable[[Message], list[tuple[list[Part], tf.Tensor]]],
        values: Sequence[tf.Tensor],
        owners: Sequence[int],
    ) -> list[tf.Tensor]:
        """Return values, with what came instead of what was sent of them."""
        came: dict[int, list[tf.Tensor]] = {}
        last: list[list[tf.Tensor]] = [[], []]
        places = [self._places[owner] for owner in owners]
        for message in messages(values, places, len(self._places)):
            # Two at a time, so that they do not take the memory of all.
            with tf.control_dependencies(last[-2]):
                received = send(message)
            last.append([row for _, row in received])
            for parts, row in received:
                ends = itertools.accumulate(part.size for part in parts)
                for part, end in zip(parts, ends, strict=True):
                    came.setdefault(part.position, []).append(
                        row[end - part.size : end]
                    )
        return [
            tf.reshape(_copied(came[i]), value.shape) if i in came else value
            for i, value in enumerate(values)
        ]


def messages(
    values: Sequence[Any], places: Sequence[int], replicas: int
) -> list[Message]:
    """Return the messages that carry values to or from their owners' places."""
    found = []
    for dtype, group in _by_dtype(values).items():
        most = MESSAGE_BYTES // (replicas * dtype.size)
        owned: list[list[tuple[int, int]]] = [[] for _ in range(replicas)]
        for i in group:
            owned[places[i]].append((i, values[i].shape.num_elements()))
        cut = [_cut(sizes, most) for sizes in owned]
        for rows in itertools.zip_longest(*cut, fillvalue=[]):
            length = max(sum(part.size for part in row) for row in rows)
            # Halves travel in words of 32 bits.
            length += length % 2 if dtype.size == 2 else 0
            found.append(Message(dtype, list(rows), length))
    return found


def _cut(sizes: Sequence[tuple[int, int]], most: int) -> list[list[Part]]:
    """Cut values, of which positions and sizes are passed, into rows."""
    rows: list[list[Part]] = []
    room = 0
    for position, size in sizes:
        start = 0
        while start < size:
            if not room:
                rows.append([])
                room = most
            stop = min(start + room, size)
            rows[-1].append(Part(position, start, stop))
            room -= stop - start
            start = stop
    return rows


def exchange_of(strategy: tf.distribute.Strategy) -> Merged | AllToAll:
    """Return the exchange that a strategy's replicas can make."""
    if is_sparse_multi_worker(strategy):
        return AllToAll(strategy.extended.channel.places)
    return Merged()


def total_squares(
    values: Sequence[tf.Tensor], groups: Sequence[int], count: int
) -> tf.Tensor:
    """Return sums of squares of what all replicas have, by group, in float64.

    Args:
        values: What this replica has.
        groups: The group of each, less than `count`.
        count: How many groups there are.
    """
    # In float32, squares of what is larger than 2e19 would be infinite.
    squares = [tf.square(norm(value)) for value in values]
    by_group: list[list[tf.Tensor]] = [[] for _ in range(count)]
    for group, square in zip(groups, squares, strict=True):
        by_group[group].append(square)
    zero = tf.zeros([], tf.float64)
    own = tf.stack([tf.add_n([zero, *group]) for group in by_group])
    return tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, own
    )


def _merge_call(merged: Any, values: list[tf.Tensor]) -> Any:
    context = tf.distribute.get_replica_context()
    return context.merge_call(merged, args=(values,))


def _by_dtype(values: Sequence[Any]) -> dict[tf.DType, list[int]]:
    """Return the positions of the values of each dtype."""
    groups: dict[tf.DType, list[int]] = {}
    for i, value in enumerate(values):
        groups.setdefault(value.dtype, []).append(i)
    return groups


def _rows(
    message: Message, rows: Sequence[list[Part]], values: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Return some rows of a message, in one copy."""
    flat = []
    for row in rows:
        flat += [
            tf.reshape(values[part.position], [-1])[part.start : part.stop]
            for part in row
        ]
        gap = message.length - sum(part.size for part in row)
        flat.append(tf.zeros([gap], message.dtype))
    return tf.reshape(tf.concat(flat, 0), [len(rows), message.length])


def _copied(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return parts joined, in memory of their own.

    A variable that is assigned a part alone would keep all of its message.
    """
    return tf.concat([*parts, tf.zeros([0], parts[0].dtype)], 0)


def _as_words(rows: tf.Tensor) -> tf.Tensor:
    """Return rows as what collectives carry: they know no bfloat16."""
    if rows.dtype.size != 2:
        return rows
    return tf.bitcast(
        tf.reshape(rows, [rows.shape[0], rows.shape[1] // 2, 2]), tf.int32
    )


def _from_words(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.size != 2:
        return words
    return tf.reshape(
        tf.bitcast(words, dtype), [tf.shape(words)[0], 2 * words.shape[1]]
    )
