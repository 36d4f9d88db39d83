"""Encodes values in a few bits, with a scale for each chunk of them.

A chunk is 64 consecutive entries of a tensor, of those that one device sends
to one other or to all: see `Layout`. It has a scale, and each entry a few bits:

    int4   one of 15 equally spaced values from -7 to 7 times the scale, which
           is a seventh of the chunk's largest magnitude
    int2   a sign, and whether a magnitude is below the mean of the chunk, or
           not; there is a scale for either, their own mean

Scales are bfloat16, which has float32's range: whatever learning rate or layer
values come from, they are rounded alike. float16 would need a unit, and have no
more to offer, since the steps are a hundred times coarser than either. A chunk
in which a value is not finite has inf for a scale. Then all its codes say what
is not finite, and 0 for the others, which are sent in a later step.
"""

import abc
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tf_optimizers.codes.layout import Layout, chunk_count

# Smaller scales count as 0: some threads take denormal numbers for 0, some do
# not, and all must read the same.
_LEAST = 2.0**-120
# Seven times this, which is a bfloat16, is a float32; not so the next one.
_LARGEST_STEP = 73 * 2.0**119
# Of each part, where the tensors end that are joined to it; none if it is one.
Ends: TypeAlias = Sequence[Sequence[int]]

_NOT_FINITE = (0.0, float("nan"), float("inf"), float("-inf"))


class Chunks(abc.ABC):
    """Values as codes of a few bits, and scales of chunks.

    Subclasses have:
        width: Bits of a code.
        scales: How many a chunk has.
    """

    width: int
    scales: int

    @abc.abstractmethod
    def encode(self, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return uint8 codes of chunks of values, and [chunks, scales]."""

    @abc.abstractmethod
    def decode(
        self, codes: tf.Tensor, scales: tf.Tensor, layout: Layout
    ) -> tf.Tensor:
        """Return the values of chunks of codes, 0 where there is no entry."""

    def byte_size(self, count: int, tensors: int = 1) -> int:
        """Return the bytes of the scales, and of the codes."""
        chunks = chunk_count(count, tensors)
        scales = self.scales * tf.bfloat16.size * chunks
        return scales + self._padded(count) * self.width // 8

    def round(
        self,
        values: Sequence[tf.Tensor],
        positions: Sequence[tf.Tensor],
        ends: Ends = (),
    ) -> list[tf.Tensor]:
        """Return float32 values as they arrive.

        To round these, or to write them, changes nothing more: the largest
        magnitude of a chunk, and the mean of equal ones, are its scales.
        """
        layout = Layout(positions, ends)
        codes, scales = self._encode(layout.fill(values))
        return self._decode(codes, scales, layout)

    def write(
        self,
        values: Sequence[tf.Tensor],
        positions: Sequence[tf.Tensor],
        ends: Ends = (),
    ) -> tf.Tensor:
        """Return the bytes of scales, then those of codes."""
        layout = Layout(positions, ends)
        rows = values[0].shape[0]
        codes, scales = self._encode(layout.fill(values))
        whole = []
        for part in layout.strip(codes):
            gap = self._padded(part.shape[1]) - part.shape[1]
            whole.append(tf.pad(part, [[0, 0], [0, gap]]))
        data = tf.reshape(tf.bitcast(scales, tf.uint8), [rows, -1])
        return tf.concat([data, self._together(tf.concat(whole, 1))], 1)

    def read(
        self,
        data: tf.Tensor,
        positions: Sequence[tf.Tensor],
        ends: Ends = (),
    ) -> list[tf.Tensor]:
        """Return the values that were written."""
        layout = Layout(positions, ends)
        counts = [part.shape[1] for part in positions]
        whole = list(map(self._padded, counts))
        size = sum(whole) * self.width // 8
        codes = tf.split(self._apart(data[:, -size:]), whole, axis=1)
        codes = [part[:, :n] for part, n in zip(codes, counts, strict=True)]
        pairs = tf.reshape(data[:, :-size], [-1, self.scales, 2])
        scales = tf.bitcast(pairs, tf.bfloat16)
        return self._decode(layout.fill(codes), scales, layout)

    def _padded(self, count: int) -> int:
        """Return the codes of so many values, which are whole bytes."""
        return count + -count % (8 // self.width)

    def _together(self, codes: tf.Tensor) -> tf.Tensor:
        """Return bytes, of which each has a code of each part of a row."""
        parts = tf.split(codes, 8 // self.width, axis=1)
        # A sum, of bits apart.
        return tf.add_n(
            [part * (1 << self.width * i) for i, part in enumerate(parts)]
        )

    def _apart(self, data: tf.Tensor) -> tf.Tensor:
        """Return the codes of `_together`."""
        lowest = np.uint8((1 << self.width) - 1)
        parts = [
            tf.bitwise.bitwise_and(
                tf.bitwise.right_shift(data, np.uint8(self.width * i)), lowest
            )
            for i in range(8 // self.width)
        ]
        return tf.concat(parts, 1)

    def _encode(self, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return codes of chunks of values, and bfloat16 scales."""
        is_broken = tf.reduce_any(
            ~tf.math.is_finite(values), axis=1, keepdims=True
        )
        codes, scales = self.encode(values)
        scales = tf.where(is_broken, float("inf"), scales)
        codes = tf.cond(
            tf.reduce_any(is_broken),
            lambda: tf.where(is_broken, _kinds(values), codes),
            lambda: codes,
        )
        return codes, tf.cast(scales, tf.bfloat16)

    def _decode(
        self, codes: tf.Tensor, scales: tf.Tensor, layout: Layout
    ) -> list[tf.Tensor]:
        scales = tf.cast(scales, tf.float32)
        is_broken = tf.math.is_inf(scales[:, :1])
        values = self.decode(codes, scales, layout)
        values = tf.cond(
            tf.reduce_any(is_broken),
            lambda: tf.where(is_broken, _of_kinds(codes), values),
            lambda: values,
        )
        return layout.strip(values)


class Int4(Chunks):
    """One of 15 equally spaced values, of which the middle is 0."""

    width, scales = 4, 1

    def encode(self, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return uint8 codes of chunks of values, and [chunks, 1] scales."""
        largest = tf.reduce_max(tf.abs(values), axis=1, keepdims=True)
        scale = _in_range(tf.minimum(largest / 7.0, _LARGEST_STEP))
        steps = tf.round(tf.math.divide_no_nan(values, scale))
        return tf.cast(steps + 7.0, tf.uint8), scale

    def decode(
        self, codes: tf.Tensor, scales: tf.Tensor, layout: Layout
    ) -> tf.Tensor:
        """Return the values of chunks of codes, 0 where there is no entry."""
        del layout  # Zeros are sent as such.
        # Exact: a step has 3 bits, and a scale 8.
        return (tf.cast(codes, tf.float32) - 7.0) * scales


class Int2(Chunks):
    """A sign, and one of two magnitudes: either is a mean."""

    width, scales = 2, 2

    def encode(self, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return uint8 codes of chunks of values, and [chunks, 2] scales."""
        magnitudes = tf.abs(values)
        largest = tf.reduce_max(magnitudes, axis=1, keepdims=True)
        # Shares of it have a sum, whatever the magnitudes. Zeros do not count.
        share = tf.math.divide_no_nan(magnitudes, largest)
        is_high = share >= _mean(share)
        means = [
            _mean(tf.where(is_high, 0.0, share)),
            _mean(tf.where(is_high, share, 0.0)),
        ]
        scales = tf.concat(means, 1) * largest
        codes = tf.cast(is_high, tf.uint8) + 2 * tf.cast(values < 0, tf.uint8)
        return codes, _in_range(scales)

    def decode(
        self, codes: tf.Tensor, scales: tf.Tensor, layout: Layout
    ) -> tf.Tensor:
        """Return the values of chunks of codes, 0 where there is no entry."""
        is_high = tf.bitwise.bitwise_and(codes, np.uint8(1)) == 1
        values = tf.where(is_high, scales[:, 1:], scales[:, :1])
        values = tf.where(codes < 2, values, -values)
        return tf.where(layout.is_empty(), 0.0, values)


def _in_range(scales: tf.Tensor) -> tf.Tensor:
    """Return scales as bfloat16 has them, in float32."""
    scales = tf.minimum(scales, tf.cast(tf.bfloat16.max, tf.float32))
    scales = tf.where(scales < _LEAST, 0.0, scales)
    return tf.cast(tf.cast(scales, tf.bfloat16), tf.float32)


def _mean(shares: tf.Tensor) -> tf.Tensor:
    """Return the mean of each chunk's numbers above 0; 0 if there are none."""
    count = tf.reduce_sum(tf.sign(shares), axis=1, keepdims=True)
    total = tf.reduce_sum(shares, axis=1, keepdims=True)
    return tf.math.divide_no_nan(total, count)


def _kinds(values: tf.Tensor) -> tf.Tensor:
    """Return which of `_NOT_FINITE` values are; 0 of those that are finite."""
    kinds = tf.where(values > 0, 2, tf.where(values < 0, 3, 1))
    kinds = tf.where(tf.math.is_finite(values), 0, kinds)
    return tf.cast(kinds, tf.uint8)


def _of_kinds(codes: tf.Tensor) -> tf.Tensor:
    """Return the values of `_kinds`."""
    kinds = tf.cast(codes % len(_NOT_FINITE), tf.int32)
    return tf.gather(tf.constant(_NOT_FINITE), kinds)
