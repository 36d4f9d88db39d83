"""Packs tensors of any dtype, and entries, as 32-bit words.

Every collective takes such words. Values of entries are floats in them, or have
a few bits.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tf_optimizers.codes.chunks import Ends, Int2, Int4
from tf_optimizers.codes.positions import (
    from_bytes,
    position_bits,
    read_positions,
    to_bytes,
    write_positions,
)


class ValueCode(Protocol):
    """How values are sent: those of several tensors, each of them [rows, n].

    `positions` are int, of the same shapes, -1 where there is no entry. `ends`
    are those of `Entries`, of each.
    """

    def byte_size(self, count: int, tensors: int = 1) -> int:
        """Return the bytes of so many values of some tensors."""

    def round(
        self,
        values: Sequence[tf.Tensor],
        positions: Sequence[tf.Tensor],
        ends: Ends = (),
    ) -> list[tf.Tensor]:
        """Return float32 values as they arrive."""

    def write(
        self,
        values: Sequence[tf.Tensor],
        positions: Sequence[tf.Tensor],
        ends: Ends = (),
    ) -> tf.Tensor:
        """Return uint8 [rows, any], what is sent of rounded values."""

    def read(
        self,
        data: tf.Tensor,
        positions: Sequence[tf.Tensor],
        ends: Ends = (),
    ) -> list[tf.Tensor]:
        """Return the values that were written."""


class Float:
    """Values as floats of a dtype."""

    def __init__(self, dtype: tf.DType) -> None:
        self.dtype = dtype

    def byte_size(self, count: int, tensors: int = 1) -> int:
        """Return the bytes of so many values."""
        del tensors
        return count * self.dtype.size

    def round(
        self,
        values: Sequence[tf.Tensor],
        positions: Sequence[tf.Tensor],
        ends: Ends = (),
    ) -> list[tf.Tensor]:
        """Finite values beyond the range become the largest there is."""
        del ends
        if self.dtype == tf.float32:
            return list(values)
        every = tf.concat(values, 1)
        limit = tf.cast(self.dtype.max, tf.float32)
        inside = tf.clip_by_value(every, -limit, limit)
        every = tf.where(tf.math.is_finite(every), inside, every)
        return _split(tf.cast(every, self.dtype), positions)

    def write(
        self,
        values: Sequence[tf.Tensor],
        positions: Sequence[tf.Tensor],
        ends: Ends = (),
    ) -> tf.Tensor:
        """Return the bytes of values."""
        del positions, ends
        data = tf.bitcast(tf.concat(values, 1), tf.uint8)
        return tf.reshape(data, [data.shape[0], -1])

    def read(
        self,
        data: tf.Tensor,
        positions: Sequence[tf.Tensor],
        ends: Ends = (),
    ) -> list[tf.Tensor]:
        """Return the values that were written."""
        del ends
        each = tf.reshape(data, [data.shape[0], -1, self.dtype.size])
        return _split(tf.bitcast(each, self.dtype), positions)


CODES: dict[str, ValueCode] = {
    "float32": Float(tf.float32),
    "float16": Float(tf.float16),
    "bfloat16": Float(tf.bfloat16),
    "int4": Int4(),
    "int2": Int2(),
}


def value_code(name: str) -> ValueCode:
    """Return one of `CODES`, or floats of another dtype as they are."""
    return CODES.get(name) or Float(tf.as_dtype(name))


def _split(joined: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return tf.split(joined, [part.shape[1] for part in like], axis=1)


_BYTES = 4


def to_words(tensor: tf.Tensor) -> tf.Tensor:
    """Return the bits of a tensor as int32 [words], filled up with zeros."""
    flat = tf.reshape(tensor, [-1])
    if tensor.dtype.size < _BYTES:
        per_word = _BYTES // tensor.dtype.size
        flat = tf.pad(flat, [[0, -tf.size(flat) % per_word]])
        flat = tf.reshape(flat, [-1, per_word])
    return tf.reshape(tf.bitcast(flat, tf.int32), [-1])


class WordReader:
    """Reads tensors of several replicas back, in the order of `to_words`.

    Args:
        words: int32, of each replica equally many.
        replicas: Their number.
    """

    def __init__(self, words: tf.Tensor, replicas: int) -> None:
        self._words = tf.reshape(words, [replicas, -1])
        self.replicas = replicas
        self._next: Any = 0

    def read(self, dtype: tf.DType, shape: Sequence[Any]) -> tf.Tensor:
        """Return [replicas, *shape] of what each replica wrote next."""
        size = math.prod(shape)
        end = self._next + -(-size * dtype.size // _BYTES)
        words = self._words[:, self._next : end]
        self._next = end
        if dtype.size > _BYTES:
            per_element = dtype.size // _BYTES
            words = tf.reshape(words, [self.replicas, -1, per_element])
        flat = tf.reshape(tf.bitcast(words, dtype), [self.replicas, -1])
        return tf.reshape(flat[:, :size], [self.replicas, *shape])


_WORD = tf.int32.size


class Entries(NamedTuple):
    """Entries of a flattened tensor, equally many on every replica.

    Args:
        values: [n].
        positions: int [n], rising; first may be some -1, with values that
            are not sent. Of several replicas, those of one after those of
            another, and 0 with a value of 0 for what was not sent.
        size: Elements of the tensor.
        code: What values are sent as, of `CODES`. They must be rounded to it.
            None for what they are.
        ends: Where tensors end that were joined to this one, which share no
            chunk; none if it is one.
    """

    values: tf.Tensor
    positions: tf.Tensor
    size: int
    code: str | None = None
    ends: tuple[int, ...] = ()

    @property
    def code_name(self) -> str:
        """What values are sent as."""
        return self.code or self.values.dtype.name

    def slices(self) -> tf.IndexedSlices:
        """Return them as TensorFlow has them."""
        return tf.IndexedSlices(
            self.values,
            tf.maximum(self.positions, 0),
            tf.constant([self.size]),
        )


def narrow_indices(part: tf.IndexedSlices) -> tf.Tensor:
    """Return the indices, as int32 where it is known to hold them."""
    shape = None
    if part.dense_shape is not None:
        shape = tf.get_static_value(part.dense_shape)
    if shape is not None and shape[0] <= tf.int32.max:
        return tf.cast(part.indices, tf.int32)
    return part.indices


def packed_bits(size: int, count: int, code: str, tensors: int = 1) -> int:
    """Return what `count` of `size` elements take, as entries of tensors."""
    values = 8 * value_code(code).byte_size(count, tensors)
    return values + position_bits(size, count)


def whole_bytes(bits: Sequence[int]) -> list[int]:
    """Return the bytes of parts that have these bits, one behind another.

    The sum is what all take: whole words. A byte counts where it begins.
    """
    ends = [-(-end // 8) for end in itertools.accumulate(bits, initial=0)]
    ends[-1] += -ends[-1] % _WORD
    return [end - start for start, end in itertools.pairwise(ends)]


def packed_words(entries: Sequence[Entries], rows: int = 1) -> int:
    """Return the words of each row of `pack_entries`."""
    bits = [
        packed_bits(
            *(e.size, e.values.shape[0] // rows, e.code_name), len(e.ends) or 1
        )
        for e in entries
    ]
    return sum(whole_bytes(bits)) // _WORD


def pack_entries(entries: Sequence[Entries], rows: int = 1) -> tf.Tensor:
    """Return the words of entries of one code, int32 [rows, words].

    Args:
        entries: Of each tensor, those of one row after those of another.
        rows: Their number.
    """
    values = [tf.reshape(e.values, [rows, -1]) for e in entries]
    positions = [tf.reshape(e.positions, [rows, -1]) for e in entries]
    code = value_code(entries[0].code_name)
    written = code.write(values, positions, [e.ends for e in entries])
    where = write_positions(positions, [e.size for e in entries])
    data = tf.concat([written, to_bytes(tf.concat(where, 1))], 1)
    words = packed_words(entries, rows)
    data = tf.pad(data, [[0, 0], [0, _WORD * words - data.shape[1]]])
    return tf.bitcast(tf.reshape(data, [rows, words, _WORD]), tf.int32)


def unpack_entries(
    words: tf.Tensor, entries: Sequence[Entries], rows: int = 1
) -> list[Entries]:
    """Return the entries of all rows that arrived, in their order.

    Args:
        words: int32 [any, words], a row of `pack_entries` in each.
        entries: This replica's, for dtypes and shapes.
        rows: In how many rows it has packed them.
    """
    sizes = [e.size for e in entries]
    counts = [e.values.shape[0] // rows for e in entries]
    code = value_code(entries[0].code_name)
    data = tf.reshape(tf.bitcast(words, tf.uint8), [words.shape[0], -1])
    ends = [e.ends for e in entries]
    first = sum(
        code.byte_size(count, len(own) or 1)
        for count, own in zip(counts, ends, strict=True)
    )
    bits = from_bytes(data[:, first:], sum(map(position_bits, sizes, counts)))
    where = read_positions(bits, sizes, counts)
    values = code.read(data[:, :first], where, ends)
    return [
        e._replace(
            values=tf.reshape(value, [-1]),
            positions=tf.cast(
                tf.reshape(tf.maximum(at, 0), [-1]), e.positions.dtype
            ),
        )
        for value, at, e in zip(values, where, entries, strict=True)
    ]
