"""The largest sums of entries, several of which may be at one address."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_optimizers.compression.shards import Shards
from tf_optimizers.distribute.entries import Entries


def largest_sums(
    values: tf.Tensor, groups: tf.Tensor, shards: Shards
) -> Entries:
    """Return what a shard sends on of the entries that it got.

    Args:
        values: float32 [n].
        groups: int64 [n], of the shard.
        shards: How many sums of each tensor are sent on.

    Returns:
        The largest sums of each tensor, at their groups; first of all zeros
        if there are fewer.
    """
    sums, groups = _sums(values, groups)
    firsts = shards.first_groups
    tensor = tf.searchsorted(firsts[1:], groups, side="right")
    slots = slots_of(sums, tensor, shards.sums)
    first = np.repeat(firsts[:-1], shards.sums)
    inside = groups - tf.gather(firsts, tensor)
    count = sum(shards.sums)
    return Entries(
        fill(slots, sums, count),
        first + fill(slots, inside, count),
        shards.span,
    )


def _sums(values: tf.Tensor, groups: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return rising groups, with the sum at the last of those that are equal.

    The others have 0.
    """
    order = rising(groups)
    values, groups = tf.gather(values, order), tf.gather(groups, order)
    is_last = tf.concat([groups[1:] != groups[:-1], [True]], 0)
    run = tf.cumsum(tf.cast(is_last, tf.int32), exclusive=True)
    sums = tf.math.unsorted_segment_sum(values, run, groups.shape[0])
    return tf.where(is_last, tf.gather(sums, run), 0.0), groups


def slots_of(
    values: tf.Tensor, bins: tf.Tensor, capacities: Sequence[int]
) -> tf.Tensor:
    """Return where entries go if each bin has so many slots.

    The largest of a bin go to its last slots, in their order. NaN is larger
    than infinity; zeros, and what does not fit, go beyond the last slot.

    Args:
        values: float32 [n].
        bins: int32 [n], not decreasing.
        capacities: Slots of each bin.

    Returns:
        int32 [n].
    """
    magnitude = tf.bitwise.bitwise_and(
        tf.bitcast(values, tf.int32), tf.int32.max
    )
    # As one key, so that each bin stays where it is.
    order = rising(
        tf.cast(bins, tf.int64) * (1 << 31)
        + tf.cast(tf.int32.max - magnitude, tf.int64)
    )
    numbers = tf.range(len(capacities))
    first = tf.searchsorted(bins, numbers)
    rank = tf.range(values.shape[0]) - tf.gather(first, bins)
    rank = tf.scatter_nd(order[:, tf.newaxis], rank, rank.shape)
    fits = (rank < tf.gather(capacities, bins)) & (magnitude > 0)
    so_far = tf.cumsum(tf.cast(fits, tf.int32))
    behind = tf.searchsorted(bins, numbers, side="right")
    ends = np.cumsum(capacities, dtype="int32")
    shift = ends - tf.gather(tf.pad(so_far, [[1, 0]]), behind) - 1
    return tf.where(fits, tf.gather(shift, bins) + so_far, ends[-1])


def fill(slots: tf.Tensor, values: tf.Tensor, count: int) -> tf.Tensor:
    """Return `count` slots with the values that go there, and zeros."""
    return tf.scatter_nd(slots[:, tf.newaxis], values, [count + 1])[:count]


def rising(keys: tf.Tensor) -> tf.Tensor:
    """Return the order in which int64 keys rise; equal ones stay in theirs."""
    return tf.math.top_k(-keys, keys.shape[0]).indices
