"""Sparse sums by owners, of which only the largest travel on.

    replica 0                            replica 1
    entries of owner 0 | of owner 1      of owner 0 | of owner 1
        └──────────────────── all-to-all ────────────────┘
    what owner 0 has, of all             what owner 1 has, of all
        ▼ sum where places are equal         ▼
    the largest sums of each tensor      likewise
        └──────────────────── all-gather ────────────────┘

What is sent does not grow with the number of replicas, as it does where each
gathers the entries of all. What an owner does not keep nobody gets.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_optimizers.distribute.entries import (
    SortedEntries,
    pack_entries,
    unpack_entries,
)
from tf_optimizers.distribute.owners import Owners
from tf_optimizers.distribute.words import WordReader


class DealtEntries(SortedEntries):
    """Entries at places of their owners, for each equally many.

    A reduction returns the sums that owners keep, at their groups: of each
    owner, one after another, `owners.kept` entries of each tensor, of which
    zeros come first.

    Args:
        values: [N, capacity].
        groups: int64 [N, capacity], rising for each owner; see `Owners`.
        owners: Who owns what.
    """

    def __init__(
        self, values: tf.Tensor, groups: tf.Tensor, owners: Owners
    ) -> None:
        super().__init__(
            tf.reshape(values, [-1]),
            tf.reshape(groups + owners.first_places, [-1]),
            tf.constant([owners.replicas * owners.span], tf.int64),
        )
        self.owners = owners


def pack_rows(dealt: DealtEntries) -> tf.Tensor:
    """Return the words for each owner, int32 [N, words]."""
    count = dealt.owners.replicas
    return tf.concat(
        [tf.reshape(words, [count, -1]) for words in pack_entries([dealt])], 1
    )


def kept_sums(rows: tf.Tensor, dealt: DealtEntries) -> SortedEntries:
    """Return what an owner keeps of the rows that it got.

    Args:
        rows: int32 [N, words], from every replica one as `pack_rows` makes
            them.
        dealt: This replica's, for dtypes and shapes.
    """
    owners = dealt.owners
    capacity = dealt.values.shape[0] // owners.replicas
    span = tf.constant([owners.span], tf.int64)
    like = SortedEntries(
        dealt.values[:capacity], dealt.indices[:capacity], span
    )
    words = WordReader(rows, owners.replicas)
    (received,) = unpack_entries(words, [like], owners.replicas)
    sums, places = _sums(tf.cast(received.values, tf.float32), received.indices)
    firsts = owners.first_groups
    tensor = tf.searchsorted(firsts[1:], places, side="right")
    slots = slots_of(sums, tensor, owners.kept)
    first = np.repeat(firsts[:-1], owners.kept)
    inside = places - tf.gather(firsts, tensor)
    count = sum(owners.kept)
    return SortedEntries(
        fill(slots, sums, count), first + fill(slots, inside, count), span
    )


def _sums(values: tf.Tensor, places: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return rising places, with the sum at the last of those that are equal.

    The others have 0.
    """
    order = rising(places)
    values, places = tf.gather(values, order), tf.gather(places, order)
    is_last = tf.concat([places[1:] != places[:-1], [True]], 0)
    run = tf.cumsum(tf.cast(is_last, tf.int32), exclusive=True)
    sums = tf.math.unsorted_segment_sum(values, run, places.shape[0])
    return tf.where(is_last, tf.gather(sums, run), 0.0), places


def slots_of(
    values: tf.Tensor, groups: tf.Tensor, capacities: Sequence[int]
) -> tf.Tensor:
    """Return where entries go if each group has so many slots.

    The largest of a group go to its last slots, in their order. NaN is larger
    than infinity; zeros, and what finds no room, go beyond the last slot.

    Args:
        values: float32 [n].
        groups: int32 [n], not decreasing.
        capacities: Slots of each group.

    Returns:
        int32 [n].
    """
    magnitude = tf.bitwise.bitwise_and(
        tf.bitcast(values, tf.int32), tf.int32.max
    )
    # As one key, so that each group stays where it is.
    order = rising(
        tf.cast(groups, tf.int64) * (1 << 31)
        + tf.cast(tf.int32.max - magnitude, tf.int64)
    )
    numbers = tf.range(len(capacities))
    first = tf.searchsorted(groups, numbers)
    rank = tf.range(values.shape[0]) - tf.gather(first, groups)
    rank = tf.scatter_nd(order[:, tf.newaxis], rank, rank.shape)
    fits = (rank < tf.gather(capacities, groups)) & (magnitude > 0)
    so_far = tf.cumsum(tf.cast(fits, tf.int32))
    behind = tf.searchsorted(groups, numbers, side="right")
    ends = np.cumsum(capacities, dtype="int32")
    shift = ends - tf.gather(tf.pad(so_far, [[1, 0]]), behind) - 1
    return tf.where(fits, tf.gather(shift, groups) + so_far, ends[-1])


def fill(slots: tf.Tensor, values: tf.Tensor, count: int) -> tf.Tensor:
    """Return `count` slots with the values that go there, and zeros."""
    return tf.scatter_nd(slots[:, tf.newaxis], values, [count + 1])[:count]


def rising(keys: tf.Tensor) -> tf.Tensor:
    """Return the order in which int64 keys rise; equal ones stay in theirs."""
    return tf.math.top_k(-keys, keys.shape[0]).indices
