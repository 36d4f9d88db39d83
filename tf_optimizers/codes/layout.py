"""Lays entries out in chunks, of which each has those of one tensor.

Of tensors that are joined to one, it depends on positions how many entries
each has. So chunks are as many as there may be, and the last ones empty:

    positions   -1  3  5 | 12        the second tensor begins at 10
    chunks      [-1  3  5  .  ...]  [12  .  .  .  ...]  [.  .  .  .  ...]
"""

from collections.abc import Sequence

import tensorflow as tf

CHUNK = 64


def chunk_count(count: int, tensors: int = 1) -> int:
    """Return how many chunks so many entries of some tensors take, at most.

    Every tensor has one, and those beyond the first of each fill others.
    """
    return min(count, tensors + max(count - tensors, 0) // CHUNK)


class Layout:
    """The chunks of some parts, each of them [rows, n].

    Args:
        positions: int of each part, which rise in a row; first may be some -1.
            They are only read where tensors are joined.
        ends: Of each part, where the tensors end that are joined to it. Empty
            if every part is one tensor.
    """

    def __init__(
        self,
        positions: Sequence[tf.Tensor],
        ends: Sequence[Sequence[int]] = (),
    ) -> None:
        ends = ends or [()] * len(positions)
        self._positions = positions
        self._parts = [
            _Joined(at, own) if own[1:] else _Alone(at)
            for at, own in zip(positions, ends, strict=True)
        ]

    def fill(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the chunks, [all, CHUNK], each filled up with zeros."""
        filled: list[tf.Tensor] = []
        for own, part in zip(self._parts, parts, strict=True):
            filled += own.fill(part)
        return tf.reshape(tf.concat(filled, 1), [-1, CHUNK])

    def strip(self, chunks: tf.Tensor) -> list[tf.Tensor]:
        """Return the parts of what `fill` has filled up."""
        sizes = [CHUNK * own.chunks for own in self._parts]
        rows = tf.reshape(chunks, [self._parts[0].rows, -1])
        return [
            own.strip(part)
            for own, part in zip(
                self._parts, tf.split(rows, sizes, axis=1), strict=True
            )
        ]

    def is_empty(self) -> tf.Tensor:
        """Return where entries are none that are sent, [all, CHUNK]."""
        return self.fill(self._positions) < 0


class _Alone:
    """The chunks of one tensor."""

    def __init__(self, like: tf.Tensor) -> None:
        self.rows, self._count = like.shape
        self.chunks = chunk_count(self._count)

    def fill(self, part: tf.Tensor) -> list[tf.Tensor]:
        gap = CHUNK * self.chunks - self._count
        return [part, tf.zeros([self.rows, gap], part.dtype)]

    def strip(self, filled: tf.Tensor) -> tf.Tensor:
        return filled[:, : self._count]


class _Joined:
    """The chunks of several tensors whose entries follow one another."""

    def __init__(self, positions: tf.Tensor, ends: Sequence[int]) -> None:
        self.rows, count = positions.shape
        self.chunks = chunk_count(count, len(ends))
        inner = tf.constant(ends[:-1], positions.dtype)
        tensor = tf.searchsorted(inner, tf.reshape(positions, [-1]), "right")
        tensor = tf.reshape(tensor, [self.rows, count])
        number = tf.range(count)
        first = _first(tensor, len(ends))
        inside = number - tf.gather(first, tensor, batch_dims=1)
        begins = tf.cast(inside % CHUNK == 0, tf.int32)
        chunk = tf.cumsum(begins, axis=1) - 1
        self._cells = CHUNK * chunk + inside % CHUNK
        first = _first(chunk, self.chunks + 1)
        entries = first[:, :-1, tf.newaxis] + tf.range(CHUNK)
        is_entry = entries < first[:, 1:, tf.newaxis]
        # Empty cells have what follows the last entry: 0.
        entries = tf.where(is_entry, entries, count)
        self._entries = tf.reshape(entries, [self.rows, -1])

    def fill(self, part: tf.Tensor) -> list[tf.Tensor]:
        part = tf.pad(part, [[0, 0], [0, 1]])
        return [tf.gather(part, self._entries, batch_dims=1)]

    def strip(self, filled: tf.Tensor) -> tf.Tensor:
        return tf.gather(filled, self._cells, batch_dims=1)


def _first(rising: tf.Tensor, count: int) -> tf.Tensor:
    """Return where each number below `count` comes first in rows of them."""
    numbers = tf.tile(tf.range(count)[tf.newaxis], [rising.shape[0], 1])
    return tf.searchsorted(rising, numbers)
