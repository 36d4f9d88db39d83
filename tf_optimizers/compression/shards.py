"""Maps entries of several tensors to the replicas that sum them.

Each of N replicas sums the entries of one shard. Each group of N consecutive
positions has one position for each shard. Groups are numbered across all
tensors. In every group, the shards are rotated, so that a regular pattern, such
as a column of a matrix, does not fall into one shard. With 4 shards:

    position    0  1  2  3    4  5  6  7    8  9 10 11   12
    group            0             1             2        3
    shard       0  1  2  3    3  0  1  2    2  3  0  1    2

An entry's address is its shard times the number of groups, plus its group. So
the addresses of a shard are consecutive, and ordered by tensor and position.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_optimizers.codes.entries import Entries
from tf_optimizers.compression.top_k import magnitude

# Knuth's multiplicative hash: a prime near 2^32 / golden ratio.
_FACTOR = 2654435761


class Shards(NamedTuple):
    """The shards of several tensors.

    Args:
        sizes: Number of elements of each tensor.
        sums: For each tensor, the number of sums that each shard sends.
        replicas: Number of replicas, N. Each replica sums one shard.
    """

    sizes: tuple[int, ...]
    sums: tuple[int, ...]
    replicas: int

    @property
    def first_groups(self) -> np.ndarray:
        """The index of each tensor's first group, then the number of groups."""
        groups = (-(-size // self.replicas) for size in self.sizes)
        return np.array([*itertools.accumulate(groups, initial=0)], "int64")

    @property
    def span(self) -> int:
        """The number of addresses of a shard: one per group."""
        return int(self.first_groups[-1])

    def addresses(self, positions: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the addresses of all tensors' entries, int64 [n].

        Args:
            positions: For each tensor, the positions of its entries in the
                flattened tensor, int.
        """
        flat = tf.concat([tf.cast(p, tf.int64) for p in positions], 0)
        sizes = [part.shape[0] for part in positions]
        group = flat // self.replicas + np.repeat(self.first_groups[:-1], sizes)
        shard = (flat + _rotation(group)) % self.replicas
        return shard * self.span + group

    def positions(self, addresses: tf.Tensor) -> list[tf.Tensor]:
        """Return the positions of sums, int64 [N * sums] for each tensor.

        Args:
            addresses: int64 [N, all sums], with a row for each shard, ordered
                by tensor.
        """
        shard, group = addresses // self.span, addresses % self.span
        inside = (shard - _rotation(group)) % self.replicas
        first = np.repeat(self.first_groups[:-1], self.sums)
        flat = (group - first) * self.replicas + inside
        parts = tf.split(flat, self.sums, axis=1)
        return [tf.reshape(part, [-1]) for part in parts]

    def largest_sums(self, received: Entries) -> list[Entries]:
        """Return this replica's largest sums, which it sends to all replicas.

        Args:
            received: Entries of the shard from all replicas; their positions
                are groups. Several entries may have the same group.

        Returns:
            The largest sums of each tensor. Their positions are groups, counted
            from the tensor's first group. If there are too few sums, zeros
            at position -1 come first.
        """
        values = tf.cast(received.values, tf.float32)
        sums, groups = _sums(values, received.positions)
        firsts = self.first_groups
        tensor = tf.searchsorted(firsts[1:], groups, side="right")
        slots = slots_of(sums, tensor, self.sums)
        inside = groups - tf.gather(firsts, tensor)
        count = sum(self.sums)
        parts = zip(
            tf.split(fill(slots, sums, count), self.sums),
            tf.split(fill(slots, inside + 1, count) - 1, self.sums),
            np.diff(firsts).tolist(),
            strict=True,
        )
        return [Entries(*part) for part in parts]

    def every_address(self, sums: Sequence[tf.IndexedSlices]) -> tf.Tensor:
        """Return the addresses of all shards' sums, int64 [N, all sums].

        Args:
            sums: The `largest_sums` of each tensor, shard by shard.
        """
        groups = [
            tf.reshape(part.indices, [self.replicas, -1]) + first
            for part, first in zip(
                sums, self.first_groups[:-1].tolist(), strict=True
            )
        ]
        shards = np.arange(self.replicas, dtype="int64")
        return tf.concat(groups, 1) + self.span * shards[:, np.newaxis]


def _rotation(group: tf.Tensor) -> tf.Tensor:
    """Return how far the shards are rotated in a group, a number below 2^16."""
    return group * _FACTOR // (1 << 16) % (1 << 16)


def _sums(values: tf.Tensor, groups: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the sum of each group, and the groups in increasing order.

    If a group occurs several times, its sum is at its last occurrence, and 0 is
    at its other occurrences.
    """
    order = stable_argsort(groups)
    values, groups = tf.gather(values, order), tf.gather(groups, order)
    is_last = tf.concat([groups[1:] != groups[:-1], [True]], 0)
    run = tf.cumsum(tf.cast(is_last, tf.int32), exclusive=True)
    sums = tf.math.unsorted_segment_sum(values, run, groups.shape[0])
    return tf.where(is_last, tf.gather(sums, run), 0.0), groups


def slots_of(
    values: tf.Tensor, bins: tf.Tensor, capacities: Sequence[int]
) -> tf.Tensor:
    """Return the slot of each entry; only a bin's largest entries get one.

    The result is int32 [n]. Slots are numbered across all bins. The largest
    entries of a bin fill its last slots, in their original order. NaN counts as
    larger than infinity. Zeros, and entries that do not fit, get the number
    after the last slot.

    Args:
        values: float32 [n].
        bins: int32 [n], the bin of each value, not decreasing.
        capacities: Number of slots of each bin.
    """
    size = magnitude(values)
    # Bin and magnitude make one key, so that sorting does not mix bins.
    order = stable_argsort(
        tf.cast(bins, tf.int64) * (1 << 31)
        + tf.cast(tf.int32.max - size, tf.int64)
    )
    numbers = tf.range(len(capacities))
    first = tf.searchsorted(bins, numbers)
    rank = tf.range(values.shape[0]) - tf.gather(first, bins)
    rank = tf.scatter_nd(order[:, tf.newaxis], rank, rank.shape)
    fits = (rank < tf.gather(capacities, bins)) & (size > 0)
    so_far = tf.cumsum(tf.cast(fits, tf.int32))
    behind = tf.searchsorted(bins, numbers, side="right")
    ends = np.cumsum(capacities, dtype="int32")
    shift = ends - tf.gather(tf.pad(so_far, [[1, 0]]), behind) - 1
    return tf.where(fits, tf.gather(shift, bins) + so_far, ends[-1])


def fill(slots: tf.Tensor, values: tf.Tensor, count: int) -> tf.Tensor:
    """Return the values of `count` slots; an empty slot has the value 0."""
    return tf.scatter_nd(slots[:, tf.newaxis], values, [count + 1])[:count]


def stable_argsort(keys: tf.Tensor) -> tf.Tensor:
    """Return the indices that sort int64 keys; equal keys keep their order."""
    return tf.math.top_k(-keys, keys.shape[0]).indices
