"""Encodes positions of entries in few bits.

This is the Elias-Fano code. The address of an entry is its position plus 1. The
low bits of an address are sent unchanged. The high bits are the number of the
address's block. Since addresses never decrease, a block is encoded as one 1 per
entry, followed by a 0. With 3 low bits, a block has 8 addresses:

    positions     4    8    11   29
    addresses     5    9    12   30     0 is the address of position -1
    low bits     101  001  100  110
    blocks        0    1    1    3      1 0  1 1 0  0  1 0

A position takes 12 bits if one element in 1000 is an entry, and 8 bits if one
in 64 is. If at least one in 4 is, a code with one bit per element is used,
because it is not longer. The choice between the codes depends only on the
number of elements and the number of entries.

Bits are booleans, or are packed into bytes, lowest bit first.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# Multiplying eight bytes that are 0 or 1 by `_COLLECT_BITS` collects them in
# the highest byte: the term 1 << 56 - 7 i puts byte i at bit 56 + i. No other
# product of a term and a byte lies in the highest byte.
_COLLECT_BITS = sum(1 << 56 - 7 * i for i in range(8))
# Multiplying a byte by `_COPY_BYTE` copies the byte to all eight bytes. The
# mask `_OWN_BITS` then keeps bit i of byte i.
_COPY_BYTE = sum(1 << 8 * i for i in range(8))
_OWN_BITS = sum(1 << 8 * i + i for i in range(8))
_HIGHEST = np.uint64(56)


def to_bytes(bits: tf.Tensor) -> tf.Tensor:
    """Pack booleans [rows, n] into bytes, uint8 [rows, ceil(n / 8)]."""
    high = tf.bitwise.right_shift(_eights(bits) * _COLLECT_BITS, _HIGHEST)
    return tf.cast(high, tf.uint8)


def from_bytes(data: tf.Tensor, count: int) -> tf.Tensor:
    """Return the first `count` bits of each row that `to_bytes` packed."""
    eight = tf.cast(data, tf.uint64) * _COPY_BYTE
    own = tf.bitwise.bitwise_and(eight, np.uint64(_OWN_BITS))
    bits = tf.cast(tf.bitcast(own, tf.uint8), tf.bool)
    return tf.reshape(bits, [data.shape[0], -1])[:, :count]


def to_planes(numbers: tf.Tensor, width: int) -> tf.Tensor:
    """Return the `width` lowest bits of numbers, bool [rows, width * n].

    The lowest bits of all numbers come first, then all second-lowest bits, and
    so on. The numbers have the shape [rows, n].
    """
    rows, count = numbers.shape
    weights = _weights(width)
    numbers = tf.cast(numbers, weights.dtype)[:, tf.newaxis]
    bits = tf.bitwise.bitwise_and(numbers, weights) != 0
    return tf.reshape(bits, [rows, width * count])


def from_planes(bits: tf.Tensor, width: int, count: int) -> tf.Tensor:
    """Return the numbers that `to_planes` split into bits, [rows, count].

    The dtype is int32 if numbers of this width fit, else int64.
    """
    planes = tf.reshape(bits, [bits.shape[0], width, count])
    weights = _weights(width)
    return tf.reduce_sum(tf.cast(planes, weights.dtype) * weights, axis=1)


def set_bits(where: tf.Tensor, size: int) -> tf.Tensor:
    """Return bool [rows, size], True at the positions `where`.

    `where` is int64 [rows, n], and must not decrease within a row.
    """
    rows = where.shape[0]
    flat = tf.reshape(where + _row_starts(rows, size), [-1])
    # This op is ten times as fast as a scatter. Validation would reject
    # repeated indices.
    bits = tf.raw_ops.SparseToDense(
        sparse_indices=flat,
        output_shape=tf.constant([rows * size], tf.int64),
        sparse_values=True,
        default_value=False,
        validate_indices=False,
    )
    return tf.reshape(bits, [rows, size])


def where_set(bits: tf.Tensor, count: int) -> tf.Tensor:
    """Return the positions of the `count` True bits of each row.

    The dtype is int32 if it can count the bits of all rows, else int64.
    """
    rows, size = bits.shape
    flat = tf.where(tf.reshape(bits, [-1]))
    dtype = position_dtype(rows * size)
    found = tf.cast(tf.reshape(flat, [rows, count]), dtype)
    return found - tf.constant(_row_starts(rows, size), dtype)


def count_set(bits: tf.Tensor) -> tf.Tensor:
    """Return how many bits of each row are True, [rows, 1]."""
    each = tf.raw_ops.PopulationCount(x=_eights(bits))
    each = tf.cast(each, position_dtype(bits.shape[1]))
    return tf.reduce_sum(each, axis=1, keepdims=True)


def position_dtype(size: int) -> tf.DType:
    """Return int32 if positions in `size` elements fit, else int64."""
    return tf.int32 if size <= tf.int32.max else tf.int64


def _eights(bits: tf.Tensor) -> tf.Tensor:
    """Return uint64 numbers that hold eight bits each, one bit per byte."""
    rows, count = bits.shape
    size = -(-count // 8)
    bits = tf.pad(tf.cast(bits, tf.uint8), [[0, 0], [0, 8 * size - count]])
    return tf.bitcast(tf.reshape(bits, [rows, size, 8]), tf.uint64)


def _row_starts(rows: int, size: int) -> np.ndarray:
    """Return the index of each row's first element in the joined rows."""
    return size * np.arange(rows, dtype="int64")[:, np.newaxis]


def _weights(width: int) -> tf.Tensor:
    """Return the first `width` powers of two, [width, 1]."""
    dtype = "int32" if width < 32 else "int64"
    powers = 1 << np.arange(width, dtype=dtype)
    return tf.constant(powers[:, np.newaxis])


def position_bits(size: int, count: int) -> int:
    """Return how many bits encode `count` positions in `size` elements."""
    low = _low_bits(size, count)
    return size if low is None else _split_bits(size, count, low)


def write_positions(
    positions: Sequence[tf.Tensor], sizes: Sequence[int]
) -> list[tf.Tensor]:
    """Encode the positions of several tensors as rows of booleans.

    Args:
        positions: int [rows, n] of each tensor. The first positions of a row
            may be -1, where there is no entry. The others increase strictly.
        sizes: Number of elements of each tensor.
    """
    counts = [part.shape[1] for part in positions]
    addresses = [tf.cast(part, tf.int64) + 1 for part in positions]
    bits = []
    for group in _groups(sizes, counts):
        bits += group.write([addresses[i] for i in group.members])
    return bits


def read_positions(
    bits: tf.Tensor, sizes: Sequence[int], counts: Sequence[int]
) -> list[tf.Tensor]:
    """Decode the positions of each tensor, int [rows, count].

    Args:
        bits: bool [rows, all], the joined results of `write_positions`.
        sizes: Number of elements of each tensor.
        counts: Number of positions of each tensor.
    """
    groups = _groups(sizes, counts)
    parts = tf.split(bits, [group.bits for group in groups], axis=1)
    found: dict[int, tf.Tensor] = {}
    for group, part in zip(groups, parts, strict=True):
        found |= dict(zip(group.members, group.read(part), strict=True))
    return [found[i] for i in range(len(sizes))]


class _BitPerElement(NamedTuple):
    """A tensor that is encoded with one bit per element."""

    members: tuple[int]
    bits: int
    entries: int

    def write(self, addresses: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        # Positions of -1 are not sent. The reader counts the missing bits.
        return [set_bits(addresses[0], self.bits + 1)[:, 1:]]

    def read(self, bits: tf.Tensor) -> list[tf.Tensor]:
        # Prepend a 1 bit for each position of -1, so that all rows have the
        # same number of 1 bits.
        count = count_set(bits)
        places = tf.range(self.entries, dtype=count.dtype)
        missing = places < self.entries - count
        found = where_set(tf.concat([missing, bits], 1), self.entries)
        return [tf.maximum(found - self.entries, -1)]


class _EliasFano(NamedTuple):
    """Tensors with the same number of low bits, encoded as one tensor."""

    low: int
    members: tuple[int, ...]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def bits(self) -> int:
        each = zip(self.sizes, self.counts, strict=True)
        return sum(_split_bits(*one, self.low) for one in each)

    @property
    def starts(self) -> list[int]:
        """The first address of each tensor in the joined tensor."""
        blocks = (_blocks(size, self.low) for size in self.sizes[:-1])
        first = itertools.accumulate(blocks, initial=0)
        return [block << self.low for block in first]

    def write(self, addresses: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        parts = zip(addresses, self.starts, strict=True)
        every = tf.concat([address + start for address, start in parts], 1)
        count = sum(self.counts)
        block = tf.bitwise.right_shift(every, tf.constant(self.low, tf.int64))
        size = self.bits - self.low * count
        ends = set_bits(block + tf.range(count, dtype=tf.int64), size)
        return [to_planes(every, self.low), ends]

    def read(self, bits: tf.Tensor) -> list[tf.Tensor]:
        count = sum(self.counts)
        planes, ends = bits[:, : self.low * count], bits[:, self.low * count :]
        block = where_set(ends, count)
        block -= tf.range(count, dtype=block.dtype)
        dtype = position_dtype(ends.shape[1] << self.low)
        low = tf.cast(from_planes(planes, self.low, count), dtype)
        every = tf.cast(block, dtype) * (1 << self.low) + low
        parts = tf.split(every, self.counts, axis=1)
        starts = self.starts
        return [part - (s + 1) for part, s in zip(parts, starts, strict=True)]


def _groups(
    sizes: Sequence[int], counts: Sequence[int]
) -> list[_BitPerElement | _EliasFano]:
    """Return tensors grouped by encoding, in the same order on all workers."""
    by_low: dict[Any, list[tuple[int, int, int]]] = {}
    for i, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        by_low.setdefault(_low_bits(size, count), []).append((i, size, count))
    return [
        *(_BitPerElement((i,), size, n) for i, size, n in by_low.pop(None, [])),
        *(_EliasFano(low, *zip(*g, strict=True)) for low, g in by_low.items()),
    ]


def _low_bits(size: int, count: int) -> int | None:
    """Return the number of low bits that gives the shortest code.

    Return None if the code with one bit per element is at least as short.
    """
    low = min(
        range(size.bit_length()), key=lambda b: _split_bits(size, count, b)
    )
    return low if _split_bits(size, count, low) < size else None


def _split_bits(size: int, count: int, low: int) -> int:
    return count * (low + 1) + _blocks(size, low)


def _blocks(size: int, low: int) -> int:
    """Return the number of blocks that hold the addresses 0 to `size`."""
    return (size >> low) + 1
