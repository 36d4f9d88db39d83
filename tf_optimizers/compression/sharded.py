"""Entries that are summed by shards, of which only the largest travel on.

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

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.base.replicas import local_rank
from tf_optimizers.compression.shards import Shards, fill, rising, slots_of
from tf_optimizers.compression.wire import (
    Exchange,
    Selection,
    position_dtype,
)
from tf_optimizers.distribute.entries import (
    Entries,
    pack_entries,
    packed_bytes,
    unpack_entries,
)
from tf_optimizers.distribute.words import WordReader


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
        # Even, so that rows of half precision are whole words.
        return (each + each % 2) * self.wire.devices

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
    ) -> tuple[Sequence[Selection], list[Gradient]]:
        """Sum selected entries and other gradients."""
        addresses = self.shards.addresses([s.positions for s in selections])
        entries, fits = self._fit(selections, addresses)
        extended = tf.distribute.get_strategy().extended
        rows = extended.all_to_all(pack_rows(entries, self.wire.replicas))
        own = self.shards.largest_sums(*self._received(rows, entries))
        (received,), sums = extended.exchange([own], others)
        values = tf.reshape(received.values, [self.wire.replicas, -1])
        every = tf.reshape(received.positions, [self.wire.replicas, -1])
        every += self.shards.first_addresses
        # That of zeros, which nobody has sent, is none.
        arrived = tf.where(values == 0, tf.constant(-1, every.dtype), every)
        sent = fits & _is_in(tf.sort(tf.reshape(arrived, [-1])), addresses)
        masks = tf.split(sent, self.counts)
        return [
            s._replace(values=tf.where(mask, s.values, tf.zeros_like(s.values)))
            for s, mask in zip(selections, masks, strict=True)
        ], [*self._updates(values, every), *sums]

    @property
    def _bytes(self) -> tuple[int, int]:
        """What a replica sends to one shard, and a shard of its sums."""
        span, count = self.shards.span, sum(self.shards.sums)
        capacity = self.capacity // self.wire.devices
        return (
            packed_bytes(span, capacity, self.wire.value_dtype),
            packed_bytes(span, count, tf.float32),
        )

    def _fit(
        self, selections: Sequence[Selection], addresses: tf.Tensor
    ) -> tuple[Entries, tf.Tensor]:
        """Return this replica's rows of entries, and which ones fit in."""
        order = rising(addresses)
        inner = tf.gather(addresses, order)
        values = tf.gather(tf.concat([s.values for s in selections], 0), order)
        shard = tf.cast(inner // self.shards.span, tf.int32)
        slots = slots_of(
            tf.cast(values, tf.float32),
            shard,
            [self.capacity] * self.wire.replicas,
        )
        count = self.capacity * self.wire.replicas
        fits = tf.cast(slots < count, tf.int32)
        fits = tf.scatter_nd(order[:, tf.newaxis], fits, fits.shape) > 0
        values = self._own_rows(fill(slots, values, count))
        groups = self._own_rows(fill(slots, inner % self.shards.span, count))
        return self.shards.entries(values, groups), fits

    def _own_rows(self, slots: tf.Tensor) -> tf.Tensor:
        """Return this replica's share of its worker's slots, [N, capacity]."""
        devices = self.wire.devices
        rows = tf.reshape(slots, [self.wire.replicas, devices, -1])
        return rows[:, local_rank(devices)]

    def _received(
        self, rows: tf.Tensor, entries: Entries
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the values and groups that all replicas sent to this shard.

        Of every replica, `rows` has one of `pack_rows`, int32 [N, words];
        dtypes and shapes are those of this replica's `entries`.
        """
        replicas = self.wire.replicas
        count = entries.values.shape[0] // replicas
        like = Entries(
            entries.values[:count], entries.positions[:count], self.shards.span
        )
        (received,) = unpack_entries(WordReader(rows, replicas), [like])
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


def pack_rows(entries: Entries, replicas: int) -> tf.Tensor:
    """Return the words for each shard, int32 [N, words]."""
    words = pack_entries([entries])
    return tf.concat([tf.reshape(part, [replicas, -1]) for part in words], 1)


def _is_in(rising_keys: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """Tell for each key whether it is among others."""
    nearest = tf.searchsorted(rising_keys[:-1], keys)
    return tf.gather(rising_keys, nearest) == keys
