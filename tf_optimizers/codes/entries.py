"""Packs tensors, and entries of tensors, into 32-bit words.

Entries are some values of a tensor, with their positions. Replicas send these
words to exchange entries, sparse rows and small dense tensors.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_optimizers.codes.layout import Layout
from tf_optimizers.codes.positions import (
    from_bytes,
    position_bits,
    read_positions,
    to_bytes,
    write_positions,
)
from tf_optimizers.codes.values import CODES

_WORD = tf.int32.size  # The size of a word in bytes.


def to_words(tensor: tf.Tensor) -> tf.Tensor:
    """Return the bits of a tensor as int32 [words], padded with zeros."""
    flat = tf.reshape(tensor, [-1])
    if tensor.dtype.size < _WORD:
        per_word = _WORD // tensor.dtype.size
        flat = tf.pad(flat, [[0, -tf.size(flat) % per_word]])
        flat = tf.reshape(flat, [-1, per_word])
    return tf.reshape(tf.bitcast(flat, tf.int32), [-1])


def join(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate tensors of one dtype and known shapes into a vector."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def split(vector: tf.Tensor, like: Sequence[Any]) -> list[tf.Tensor]:
    """Split a vector into tensors with the shapes of those in `like`."""
    parts = tf.split(vector, [each.shape.num_elements() for each in like])
    shapes = [each.shape for each in like]
    return list(map(tf.reshape, parts, shapes))


class WordReader:
    """Reads tensors of all replicas, in the order in which they were written.

    Args:
        words: int32, the words of all replicas, one replica after another. Each
            replica wrote the same number of words.
        replicas: int >= 1. The number of replicas.
    """

    def __init__(self, words: tf.Tensor, replicas: int) -> None:
        self._words = tf.reshape(words, [replicas, -1])
        self.replicas = replicas
        self._next: Any = 0

    def read(self, dtype: tf.DType, shape: Sequence[Any]) -> tf.Tensor:
        """Return the next tensor of each replica, [replicas, *shape]."""
        size = math.prod(shape)
        end = self._next + -(-size * dtype.size // _WORD)
        words = self._words[:, self._next : end]
        self._next = end
        if dtype.size > _WORD:
            per_element = dtype.size // _WORD
            words = tf.reshape(words, [self.replicas, -1, per_element])
        flat = tf.reshape(tf.bitcast(words, dtype), [self.replicas, -1])
        return tf.reshape(flat[:, :size], [self.replicas, *shape])


class Entries(NamedTuple):
    """Some values of a flattened tensor, with their positions.

    Every replica has the same number of entries.

    Args:
        values: [n].
        positions: int [n], increasing within a row; see `pack_entries`. The
            first positions of a row may be -1, where there is no entry. After
            an exchange, the entries of all replicas are concatenated, and such
            places have position 0 and value 0.
        size: The number of elements of the tensor.
        code: The encoding of values, a key of `CODES`. `values` are already
            rounded to this encoding. Defaults to `"float32"`.
        ends: If several tensors were joined into one, the position where
            each tensor ends. Defaults to `()`, for a single tensor.
    """

    values: tf.Tensor
    positions: tf.Tensor
    size: int
    code: str = "float32"
    ends: tuple[int, ...] = ()

    def slices(self) -> tf.IndexedSlices:
        """Return the entries as `tf.IndexedSlices`."""
        return tf.IndexedSlices(
            self.values,
            tf.maximum(self.positions, 0),
            tf.constant([self.size]),
        )


def narrow_indices(slices: tf.IndexedSlices) -> tf.Tensor:
    """Return the indices of slices, as int32 if the static shape allows it."""
    shape = tf.get_static_value(slices.dense_shape)
    if shape is not None and shape[0] <= tf.int32.max:
        return tf.cast(slices.indices, tf.int32)
    return slices.indices


def packed_bits(size: int, count: int, code: str, tensors: int = 1) -> int:
    """Return the number of bits that `count` packed entries take."""
    values = 8 * CODES[code].byte_size(count, tensors)
    return values + position_bits(size, count)


def whole_bytes(bits: Sequence[int]) -> list[int]:
    """Return how many bytes of a message belong to each of its parts.

    `bits` are the sizes of the parts, which follow one another without gaps. A
    byte with bits of several parts counts toward the first of them. The last
    part includes the padding to a whole number of words.
    """
    ends = [-(-end // 8) for end in itertools.accumulate(bits, initial=0)]
    ends[-1] += -ends[-1] % _WORD
    return [end - start for start, end in itertools.pairwise(ends)]


def packed_words(entries: Sequence[Entries], rows: int = 1) -> int:
    """Return the number of words per row in the result of `pack_entries`."""
    bits = [
        packed_bits(e.size, e.values.shape[0] // rows, e.code, len(e.ends) or 1)
        for e in entries
    ]
    return sum(whole_bytes(bits)) // _WORD


def pack_entries(entries: Sequence[Entries], rows: int = 1) -> tf.Tensor:
    """Pack entries with the same code into words, int32 [rows, words].

    Args:
        entries: The entries of each tensor, row by row. Each row has the same
            number of entries.
        rows: int >= 1. The number of rows. Defaults to `1`.
    """
    values = [tf.reshape(e.values, [rows, -1]) for e in entries]
    positions = [tf.reshape(e.positions, [rows, -1]) for e in entries]
    layout = Layout(positions, [e.ends for e in entries])
    written = CODES[entries[0].code].write(values, layout)
    bits = write_positions(positions, [e.size for e in entries])
    data = tf.concat([written, to_bytes(tf.concat(bits, 1))], 1)
    words = packed_words(entries, rows)
    data = tf.pad(data, [[0, 0], [0, _WORD * words - data.shape[1]]])
    return tf.bitcast(tf.reshape(data, [rows, words, _WORD]), tf.int32)


def unpack_entries(
    words: tf.Tensor, entries: Sequence[Entries], rows: int = 1
) -> list[Entries]:
    """Return the entries of all received rows, in the order of the rows.

    Args:
        words: int32 [received rows, words], from `pack_entries` on other
            replicas or on this replica.
        entries: The entries that this replica packed. Each received row has the
            same dtypes and numbers of entries as each packed row.
        rows: The number of rows that this replica packed. Defaults to `1`.
    """
    sizes = [e.size for e in entries]
    counts = [e.values.shape[0] // rows for e in entries]
    code = CODES[entries[0].code]
    data = tf.reshape(tf.bitcast(words, tf.uint8), [words.shape[0], -1])
    first = sum(
        code.byte_size(count, len(e.ends) or 1)
        for count, e in zip(counts, entries, strict=True)
    )
    bits = from_bytes(data[:, first:], sum(map(position_bits, sizes, counts)))
    positions = read_positions(bits, sizes, counts)
    layout = Layout(positions, [e.ends for e in entries])
    return [
        e._replace(
            values=tf.reshape(value, [-1]),
            positions=tf.cast(
                tf.reshape(tf.maximum(at, 0), [-1]), e.positions.dtype
            ),
        )
        for value, at, e in zip(
            code.read(data[:, :first], layout), positions, entries, strict=True
        )
    ]
