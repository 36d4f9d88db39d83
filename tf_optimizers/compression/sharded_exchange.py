"""Sums entries by shards, of which only the largest travel on.

    replica 0                            replica 1
    entries of shard 0 | of shard 1      of shard 0 | of shard 1
        └──────────────────── all-to-all ────────────────┘
    what all have of shard 0             what all have of shard 1
        ▼ sum where addresses are equal      ▼
    the largest sums of each tensor      likewise
        └──────────────────── all-gather ────────────────┘

What is sent does not grow with the number of replicas. A replica sends each
shard its largest entries, as many as that has capacity for. It takes out of v
and u those that fitted and whose sums came back; all others wait there.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.codes.entries import (
    Entries,
    pack_entries,
    packed_bits,
    unpack_entries,
    whole_bytes,
)
from tf_optimizers.codes.positions import position_dtype
from tf_optimizers.compression.shards import Shards, fill, rising, slots_of
from tf_optimizers.compression.wire import Exchange, Selection
from tf_optimizers.replicas import replicas_of


class ShardedExchange(Exchange):
    """Each replica sums a shard of all entries, and sends on the largest sums.

    An entry counts as sent if it fitted, and its sum came back.
    """

    @property
    def shards(self) -> Shards:
        """How the variables are shared out."""
        replicas = self.wire.replicas
        sums = tuple(-(-count // replicas) for count in self.counts)
        return Shards(tuple(self.sizes), sums, replicas)

    @property
    def capacity(self) -> int:
        """How many entries a shard takes of a residual, at most.

        As many as it would get on average if addresses were random, plus three
        standard deviations.
        """
        mean = sum(self.counts) / self.wire.replicas
        each = math.ceil((mean + 3 * math.sqrt(mean)) / self.wire.devices)
        return each * self.wire.devices

    @property
    def bytes_for_one(self) -> int:
        """What a replica sends to a shard, and what its own sends to each."""
        return sum(self._bytes)

    def sent_bytes(self) -> list[int]:
        """Return what the selected entries of each variable take."""
        entries, sums = self._bytes
        total = self.wire.replicas * entries + sums
        # They have rows in common: each takes its part.
        ends = [
            total * end // sum(self.counts)
            for end in itertools.accumulate(self.counts, initial=0)
        ]
        return [end - start for start, end in itertools.pairwise(ends)]

    def sum(
        self, selections: Sequence[Selection], others: Sequence[Gradient]
    ) -> tuple[list[tf.Tensor], list[Gradient]]:
        """Sum selected entries and other gradients."""
        addresses = self.shards.addresses(
            [tf.maximum(s.positions, 0) for s in selections]
        )
        entries, fitting = self._fit(selections, addresses)
        group, replicas = replicas_of(), self.wire.replicas
        words = group.all_to_all(pack_entries([entries], replicas))
        own = self.shards.largest_sums(*self._received(words, entries))
        came = group.exchange([*own, *others])
        received, sums = came[: len(own)], came[len(own) :]
        values = tf.concat(
            [tf.reshape(part.values, [replicas, -1]) for part in received], 1
        )
        every = self.shards.every_address(received)
        # Zeros, which no replica has sent, do not count.
        arrived = tf.where(values == 0, tf.constant(-1, every.dtype), every)
        is_sent = _is_in(tf.sort(tf.reshape(arrived, [-1])), addresses)
        sent = tf.where(is_sent, fitting, tf.zeros_like(fitting))
        return tf.split(sent, self.counts), [
            *self._updates(values, every),
            *sums,
        ]

    @property
    def _bytes(self) -> tuple[int, int]:
        """What a replica sends to one shard, and a shard of its sums."""
        capacity = self.capacity // self.wire.devices
        row = packed_bits(
            *(self.shards.span, capacity, self.wire.value_dtype),
            len(self.sizes),
        )
        sizes = np.diff(self.shards.first_groups).tolist()
        sums = [
            packed_bits(size, count, "float32")
            for size, count in zip(sizes, self.shards.sums, strict=True)
        ]
        return sum(whole_bytes([row])), sum(whole_bytes(sums))

    def _fit(
        self, selections: Sequence[Selection], addresses: tf.Tensor
    ) -> tuple[Entries, tf.Tensor]:
        """Return this replica's rows, and what arrives of its selections.

        Values in the rows are rounded, as those of the other devices are,
        which share the worker's residual. What does not fit in is 0.
        """
        order = rising(addresses)
        inner = tf.gather(addresses, order)
        values = tf.gather(tf.concat([s.values for s in selections], 0), order)
        shard = tf.cast(inner // self.shards.span, tf.int32)
        replicas, span = self.wire.replicas, self.shards.span
        slots = slots_of(values, shard, [self.capacity] * replicas)
        count = self.capacity * replicas
        rows = [replicas * self.wire.devices, -1]
        groups = tf.reshape(fill(slots, inner % span + 1, count) - 1, rows)
        values = tf.reshape(fill(slots, values, count), rows)
        # Variables follow one another, and share no scale.
        ends = tuple(self.shards.first_groups[1:].tolist())
        (rounded,) = self.wire.rounded([values], [groups], [ends])
        arriving = tf.cast(tf.reshape(rounded, [-1]), tf.float32)
        # What has no slot is behind them all.
        arriving = tf.gather(tf.pad(arriving, [[0, 1]]), slots)
        return Entries(
            self._own_rows(rounded),
            self._own_rows(groups),
            span,
            self.wire.value_dtype,
            ends,
        ), tf.scatter_nd(order[:, tf.newaxis], arriving, arriving.shape)

    def _own_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Return this replica's, one after another, of its worker's rows."""
        devices = self.wire.devices
        rows = tf.reshape(rows, [self.wire.replicas, devices, -1])
        return tf.reshape(rows[:, replicas_of().rank % devices], [-1])

    def _received(
        self, words: tf.Tensor, entries: Entries
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the values and groups that all replicas sent to this shard.

        Args:
            words: Of every replica a row of `pack_entries`, int32 [N, words].
            entries: This replica's, for dtypes and shapes.
        """
        (received,) = unpack_entries(words, [entries], self.wire.replicas)
        return tf.cast(received.values, tf.float32), received.positions

    def _updates(
        self, values: tf.Tensor, addresses: tf.Tensor
    ) -> list[tf.IndexedSlices]:
        """Return the sums of each variable."""
        parts = zip(
            self.shards.split(values),
            self.shards.positions(addresses),
            self.sizes,
            strict=True,
        )
        return [
            Entries(value, tf.cast(at, position_dtype(size)), size).slices()
            for value, at, size in parts
        ]


def _is_in(rising_keys: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """Tell for each key whether it is among others."""
    nearest = tf.searchsorted(rising_keys[:-1], keys)
    return tf.gather(rising_keys, nearest) == keys
