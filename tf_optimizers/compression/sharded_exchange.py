"""Sums entries by shard, and sends only the largest sums to all replicas.

    replica 0                            replica 1
    entries of shard 0 | of shard 1      of shard 0 | of shard 1
        └──────────────────── all-to-all ────────────────┘
    all entries of shard 0               all entries of shard 1
        ▼ sum at equal positions             ▼
    the largest sums of each tensor      the largest sums of each tensor
        └──────────────────── all-gather ────────────────┘

A shard is the part of all variables that one replica sums. A replica sends its
largest entries of each shard, up to the shard's capacity. With more replicas,
the capacity is smaller, so the bytes hardly grow. An entry counts as sent if it
fits into its shard, is not rounded to 0, and has one of the largest sums. Sent
entries are removed from the residual and from a masked momentum.
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
from tf_optimizers.codes.layout import Layout
from tf_optimizers.codes.positions import position_dtype
from tf_optimizers.codes.values import CODES
from tf_optimizers.compression.shards import (
    Shards,
    fill,
    slots_of,
    stable_argsort,
)
from tf_optimizers.compression.wire import Exchange, Selection
from tf_optimizers.replicas import replicas_of


class ShardedExchange(Exchange):
    """Each replica sums the entries of a shard, and sends the largest sums."""

    @property
    def shards(self) -> Shards:
        """The division of all variables into shards, one per replica."""
        replicas = self.wire.replicas
        sums = tuple(-(-count // replicas) for count in self.counts)
        return Shards(tuple(self.sizes), sums, replicas)

    @property
    def capacity(self) -> int:
        """The largest number of entries that a shard accepts from a sender.

        The capacity is the mean number of a sender's entries in a shard, for
        random positions, plus three standard deviations. Replicas that share
        residuals count as one sender.
        """
        mean = sum(self.counts) / self.wire.replicas
        each = math.ceil((mean + 3 * math.sqrt(mean)) / self.wire.devices)
        return each * self.wire.devices

    @property
    def peer_bytes(self) -> int:
        """The bytes that a replica sends to one other replica."""
        return sum(self._bytes)

    def sent_bytes(self) -> list[int]:
        """Return the bytes that a replica sends for each variable."""
        entries, sums = self._bytes
        total = self.wire.replicas * entries + sums
        # A message holds entries of all variables, so divide its bytes among
        # the variables in proportion to their numbers of entries.
        ends = [
            total * end // sum(self.counts)
            for end in itertools.accumulate(self.counts, initial=0)
        ]
        return [end - start for start, end in itertools.pairwise(ends)]

    @property
    def _bytes(self) -> tuple[int, int]:
        """The bytes of the entries for one shard, and of that shard's sums."""
        shards, code = self.shards, self.wire.value_dtype
        capacity = self.capacity // self.wire.devices
        row = packed_bits(shards.span, capacity, code, len(self.sizes))
        sizes = np.diff(shards.first_groups).tolist()
        sums = [
            packed_bits(size, count, "float32")
            for size, count in zip(sizes, shards.sums, strict=True)
        ]
        return sum(whole_bytes([row])), sum(whole_bytes(sums))

    def sum(
        self, selections: Sequence[Selection], others: Sequence[Gradient]
    ) -> tuple[list[tf.Tensor], list[Gradient]]:
        """Sum selected entries and other gradients."""
        group, replicas, shards = replicas_of(), self.wire.replicas, self.shards
        addresses = shards.addresses(
            [tf.maximum(s.positions, 0) for s in selections]
        )
        entries, fitting = self._fit(selections, addresses)
        words = group.all_to_all(pack_entries([entries], replicas))
        (received,) = unpack_entries(words, [entries], replicas)
        own = shards.largest_sums(received)
        came = group.gather_and_sum([*own, *others])
        sums, others = came[: len(own)], came[len(own) :]
        values = tf.concat(
            [tf.reshape(part.values, [replicas, -1]) for part in sums], 1
        )
        every = shards.every_address(sums)
        # A value of 0 means that the shard had fewer nonzero sums than it may
        # send.
        arrived = tf.where(values == 0, tf.constant(-1, every.dtype), every)
        is_sent = _is_in(tf.sort(tf.reshape(arrived, [-1])), addresses)
        sent = tf.where(is_sent, fitting, tf.zeros_like(fitting))
        updates = [
            Entries(
                part.values, tf.cast(at, position_dtype(size)), size
            ).slices()
            for part, at, size in zip(
                sums, shards.positions(every), self.sizes, strict=True
            )
        ]
        return tf.split(sent, self.counts), [*updates, *others]

    def _fit(
        self, selections: Sequence[Selection], addresses: tf.Tensor
    ) -> tuple[Entries, tf.Tensor]:
        """Return the entries to send, and each entry's value after rounding.

        The value is 0 if the entry does not fit into its shard. The devices of
        a worker share residuals, so each device rounds the entries of all
        devices, but sends only its own part.
        """
        order = stable_argsort(addresses)
        inner = tf.gather(addresses, order)
        values = tf.gather(tf.concat([s.values for s in selections], 0), order)
        shard = tf.cast(inner // self.shards.span, tf.int32)
        replicas, span = self.wire.replicas, self.shards.span
        slots = slots_of(values, shard, [self.capacity] * replicas)
        count = self.capacity * replicas
        rows = [replicas * self.wire.devices, -1]
        groups = tf.reshape(fill(slots, inner % span + 1, count) - 1, rows)
        values = tf.reshape(fill(slots, values, count), rows)
        # A row holds entries of all variables. `ends` separates the variables,
        # because a scale is shared only by entries of the same variable.
        ends = tuple(self.shards.first_groups[1:].tolist())
        code = CODES[self.wire.value_dtype]
        (rounded,) = code.round([values], Layout([groups], [ends]))
        arriving = tf.cast(tf.reshape(rounded, [-1]), tf.float32)
        # An entry that does not fit reads the 0 after the last slot.
        arriving = tf.gather(tf.pad(arriving, [[0, 1]]), slots)
        entries = Entries(
            values=self.wire.own_portion(rounded),
            positions=self.wire.own_portion(groups),
            size=span,
            code=self.wire.value_dtype,
            ends=ends,
        )
        places = order[:, tf.newaxis]
        return entries, tf.scatter_nd(places, arriving, arriving.shape)


def _is_in(rising_keys: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """Return for each key whether it is in `rising_keys`."""
    nearest = tf.searchsorted(rising_keys[:-1], keys)
    return tf.gather(rising_keys, nearest) == keys
