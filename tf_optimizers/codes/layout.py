"""Groups the entries of tensors into chunks, each with its own scales.

An entry is a value of a tensor, with its position. A chunk holds entries of one
tensor. If several tensors are joined into one, the positions show how many
entries belong to each tensor. The layout then has as many chunks as the tensors
can need at most, so that its shape does not depend on the positions. The last
chunks may be empty:

    positions   -1  3  5 | 12        the three tensors end at 10, 20 and 30
    chunks      [-1  3  5  .  ...]  [12  .  .  .  ...]  [.  .  .  .  ...]
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

CHUNK = 64


def chunk_count(count: int, tensors: int = 1) -> int:
    """Return the largest number of chunks that `count` entries can need.

    The first entry of each tensor begins a chunk. Every `CHUNK` further entries
    may need another chunk.
    """
    return min(count, tensors + max(count - tensors, 0) // CHUNK)


class Layout:
    """Puts entries into chunks, and takes them out again.

    The entries are given as parts of shape [rows, n]. A part has the entries of
    one tensor, or of several joined tensors.

    Args:
        positions: int [rows, n] of each part, increasing in each row. The first
            positions of a row may be -1, where there is no entry.
        ends: For each part, the positions where its tensors end. By default,
            every part is one tensor.
    """

    def __init__(
        self,
        positions: Sequence[tf.Tensor],
        ends: Sequence[Sequence[int]] = (),
    ) -> None:
        self.rows = positions[0].shape[0]
        self.counts = [at.shape[1] for at in positions]
        self._positions = positions
        self._ends = ends or [()] * len(positions)

    @functools.cached_property
    def _parts(self) -> "list[_OneTensor | _SeveralTensors]":
        return [
            _SeveralTensors(at, ends) if ends[1:] else _OneTensor(at)
            for at, ends in zip(self._positions, self._ends, strict=True)
        ]

    def fill(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the parts in chunks, [chunks, CHUNK], padded with zeros."""
        filled: list[tf.Tensor] = []
        for own, part in zip(self._parts, parts, strict=True):
            filled += own.fill(part)
        return tf.reshape(tf.concat(filled, 1), [-1, CHUNK])

    def strip(self, chunks: tf.Tensor) -> list[tf.Tensor]:
        """Return the parts that `fill` put into chunks."""
        sizes = [CHUNK * own.chunks for own in self._parts]
        rows = tf.reshape(chunks, [self.rows, -1])
        return [
            own.strip(part)
            for own, part in zip(
                self._parts, tf.split(rows, sizes, axis=1), strict=True
            )
        ]

    def is_empty(self) -> tf.Tensor:
        """Return which cells of chunks have position -1, [chunks, CHUNK]."""
        return self.fill(self._positions) < 0


class _OneTensor:
    """The chunks of one tensor."""

    def __init__(self, positions: tf.Tensor) -> None:
        self._count = positions.shape[1]
        self.chunks = chunk_count(self._count)

    def fill(self, part: tf.Tensor) -> list[tf.Tensor]:
        gap = CHUNK * self.chunks - self._count
        return [part, tf.zeros([part.shape[0], gap], part.dtype)]

    def strip(self, filled: tf.Tensor) -> tf.Tensor:
        return filled[:, : self._count]


class _SeveralTensors:
    """The chunks of several tensors whose entries follow one another."""

    def __init__(self, positions: tf.Tensor, ends: Sequence[int]) -> None:
        rows, count = positions.shape
        self.chunks = chunk_count(count, len(ends))
        inner = tf.constant(ends[:-1], positions.dtype)
        tensor = tf.searchsorted(inner, tf.reshape(positions, [-1]), "right")
        tensor = tf.reshape(tensor, [rows, count])
        first = _first_indices(tensor, len(ends))
        # The index of each entry within its tensor.
        number = tf.range(count) - tf.gather(first, tensor, batch_dims=1)
        begins = tf.cast(number % CHUNK == 0, tf.int32)
        chunk = tf.cumsum(begins, axis=1) - 1
        self._cells = CHUNK * chunk + number % CHUNK
        first = _first_indices(chunk, self.chunks + 1)
        entries = first[:, :-1, tf.newaxis] + tf.range(CHUNK)
        is_entry = entries < first[:, 1:, tf.newaxis]
        # Cells without an entry refer to the zero that `fill` appends.
        entries = tf.where(is_entry, entries, count)
        self._entries = tf.reshape(entries, [rows, -1])

    def fill(self, part: tf.Tensor) -> list[tf.Tensor]:
        part = tf.pad(part, [[0, 0], [0, 1]])
        return [tf.gather(part, self._entries, batch_dims=1)]

    def strip(self, filled: tf.Tensor) -> tf.Tensor:
        return tf.gather(filled, self._cells, batch_dims=1)


def _first_indices(rising: tf.Tensor, count: int) -> tf.Tensor:
    """Return the index of the first occurrence of each number below `count`.

    Each row of `rising` is searched separately. For a number that does not
    occur in a row, the result is the index where it would be inserted.
    """
    numbers = tf.tile(tf.range(count)[tf.newaxis], [rising.shape[0], 1])
    return tf.searchsorted(rising, numbers)
