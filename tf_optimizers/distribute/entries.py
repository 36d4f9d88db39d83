"""Entries of several flattened tensors as words, 2 bytes per position.

    positions   5  9  65541  131090     of a tensor of 3 blocks of 65,536
    low halves  5  9      5      18     16 bits each
    counts      2         1       1     of the entries in each block

Tensors are numbered through in blocks, so that all are coded at once.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_optimizers.distribute.words import WordReader, to_words

BLOCK = 1 << 16  # What 16 bits tell apart.


class Entries(NamedTuple):
    """Entries of a flattened tensor, equally many on every replica.

    Args:
        values: [n].
        positions: int [n], rising; of several replicas, those of one after
            those of another.
        size: Elements of the tensor.
    """

    values: tf.Tensor
    positions: tf.Tensor
    size: int

    def slices(self) -> tf.IndexedSlices:
        """Return them as TensorFlow has them."""
        return tf.IndexedSlices(
            self.values, self.positions, tf.constant([self.size])
        )


def narrow_indices(part: tf.IndexedSlices) -> tf.Tensor:
    """Return the indices, as int32 where it is known to hold them."""
    shape = None
    if part.dense_shape is not None:
        shape = tf.get_static_value(part.dense_shape)
    if shape is not None and shape[0] <= tf.int32.max:
        return tf.cast(part.indices, tf.int32)
    return part.indices


def packed_bytes(size: int, count: int, value_dtype: tf.DType) -> int:
    """Return what `count` of `size` entries take, but for filling a word."""
    return count * (value_dtype.size + 2) + 4 * _blocks(size)


def pack_entries(entries: Sequence[Entries]) -> list[tf.Tensor]:
    """Return the words of entries whose values are of one dtype."""
    firsts = _first_blocks(entries)
    positions = tf.concat([tf.cast(e.positions, tf.int64) for e in entries], 0)
    positions += _per_entry(entries, firsts[:-1]) * BLOCK
    block = tf.cast(positions // BLOCK, tf.int32)
    counts = tf.math.unsorted_segment_sum(
        tf.ones_like(block), block, firsts[-1]
    )
    return [
        to_words(tf.concat([e.values for e in entries], 0)),
        to_words(tf.cast(positions % BLOCK, tf.uint16)),
        counts,
    ]


def unpack_entries(
    words: WordReader, entries: Sequence[Entries]
) -> list[Entries]:
    """Return the entries of all replicas, in their order.

    Args:
        words: What each replica packed.
        entries: This replica's, for dtypes and shapes.
    """
    sizes = [e.values.shape[0] for e in entries]
    firsts = _first_blocks(entries)
    values = words.read(entries[0].values.dtype, [sum(sizes)])
    low = words.read(tf.uint16, [sum(sizes)])
    ends = tf.cumsum(words.read(tf.int32, [firsts[-1]]), axis=1)
    order = tf.tile(tf.range(sum(sizes))[tf.newaxis], [words.replicas, 1])
    block = tf.searchsorted(ends, order, side="right")
    block = tf.cast(block, tf.int64) - _per_entry(entries, firsts[:-1])
    positions = block * BLOCK + tf.cast(low, tf.int64)
    return [
        e._replace(
            values=tf.reshape(part, [-1]),
            positions=tf.cast(tf.reshape(where, [-1]), e.positions.dtype),
        )
        for part, where, e in zip(
            tf.split(values, sizes, axis=1),
            tf.split(positions, sizes, axis=1),
            entries,
            strict=True,
        )
    ]


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _first_blocks(entries: Sequence[Entries]) -> list[int]:
    """Return the number of each tensor's first block, and of all blocks."""
    blocks = (_blocks(e.size) for e in entries)
    return list(itertools.accumulate(blocks, initial=0))


def _per_entry(
    entries: Sequence[Entries], numbers: Sequence[int]
) -> np.ndarray:
    """Repeat the number of each tensor for each of its entries."""
    counts = [e.values.shape[0] for e in entries]
    return np.repeat(np.array(numbers, "int64"), counts)
