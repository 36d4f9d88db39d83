"""Encodes values as floats, or in a few bits with scales for each chunk.

A chunk holds up to 64 consecutive entries that a replica sends from one tensor;
see `Layout`. Two codes encode each value in a few bits:

    int4   one of 15 equally spaced values, from -7 to 7 times the scale; the
           scale is a seventh of the chunk's largest magnitude
    int2   a sign, and whether the magnitude is below the chunk's mean
           magnitude; the scales are the mean of the magnitudes below this mean
           and the mean of the others

Scales are bfloat16. This dtype has the range of float32, so the relative
rounding error does not depend on the learning rate or on the layer. The higher
precision of float16 would not help, because codes are much coarser than either
dtype.

If a value of a chunk is not finite, the chunk's scales are inf. Codes 1, 2 and
3 then stand for NaN, inf and -inf. Finite values of such a chunk have code 0
and are read as 0, so a replica keeps them and sends them later.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_optimizers.codes.layout import Layout, chunk_count

# Smaller scales become 0. Not all threads flush denormal numbers to 0, but all
# replicas must read the same values.
_SMALLEST_SCALE = 2.0**-120
# The largest bfloat16 number whose product with 7 is finite in float32.
_LARGEST_STEP = 73 * 2.0**119

_NOT_FINITE = (0.0, float("nan"), float("inf"), float("-inf"))


class Float:
    """Encodes values as floats of a dtype."""

    def __init__(self, dtype: tf.DType) -> None:
        self.dtype = dtype

    def byte_size(self, count: int, tensors: int = 1) -> int:
        """Return the number of bytes of `count` values."""
        return count * self.dtype.size

    def round(
        self, values: Sequence[tf.Tensor], layout: Layout
    ) -> list[tf.Tensor]:
        """Cast values to the dtype, and clip finite values to its range."""
        if self.dtype == tf.float32:
            return list(values)
        every = tf.concat(values, 1)
        limit = tf.cast(self.dtype.max, tf.float32)
        inside = tf.clip_by_value(every, -limit, limit)
        every = tf.where(tf.math.is_finite(every), inside, every)
        return tf.split(tf.cast(every, self.dtype), layout.counts, axis=1)

    def write(self, values: Sequence[tf.Tensor], layout: Layout) -> tf.Tensor:
        """Encode rounded values as bytes, uint8 [rows, bytes]."""
        data = tf.bitcast(tf.concat(values, 1), tf.uint8)
        return tf.reshape(data, [data.shape[0], -1])

    def read(self, data: tf.Tensor, layout: Layout) -> list[tf.Tensor]:
        """Return the values that `write` encoded."""
        each = tf.reshape(data, [data.shape[0], -1, self.dtype.size])
        every = tf.bitcast(each, self.dtype)
        return tf.split(every, layout.counts, axis=1)


class Chunked:
    """Encodes values in a few bits, with scales for each chunk.

    Attributes:
        width: The number of bits of a code.
        scales: The number of scales of a chunk.
        encode: Returns the uint8 codes of chunks, and their scales, [chunks,
            scales].
        decode: Returns the values of chunks, with 0 for entries at position -1.
    """

    width: int
    scales: int
    encode: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
    decode: Callable[[tf.Tensor, tf.Tensor, Layout], tf.Tensor]

    def byte_size(self, count: int, tensors: int = 1) -> int:
        """Return the number of bytes of `count` values and their scales."""
        chunks = chunk_count(count, tensors)
        scales = self.scales * tf.bfloat16.size * chunks
        return scales + self._padded(count) * self.width // 8

    def round(
        self, values: Sequence[tf.Tensor], layout: Layout
    ) -> list[tf.Tensor]:
        """Return the float32 values that a receiver will read.

        Rounding these values again changes nothing, because the largest
        magnitude of a chunk and the mean of equal magnitudes stay the same.
        """
        codes, scales = self._encode(layout.fill(values))
        return self._decode(codes, scales, layout)

    def write(self, values: Sequence[tf.Tensor], layout: Layout) -> tf.Tensor:
        """Encode values as bytes, scales before codes, uint8 [rows, n]."""
        codes, scales = self._encode(layout.fill(values))
        padded = [
            tf.pad(part, [[0, 0], [0, self._padded(count) - count]])
            for part, count in zip(
                layout.strip(codes), layout.counts, strict=True
            )
        ]
        data = tf.reshape(tf.bitcast(scales, tf.uint8), [layout.rows, -1])
        return tf.concat([data, self._to_bytes(tf.concat(padded, 1))], 1)

    def read(self, data: tf.Tensor, layout: Layout) -> list[tf.Tensor]:
        """Return the values that `write` encoded."""
        padded = list(map(self._padded, layout.counts))
        size = sum(padded) * self.width // 8
        parts = tf.split(self._from_bytes(data[:, -size:]), padded, axis=1)
        codes = [
            part[:, :count]
            for part, count in zip(parts, layout.counts, strict=True)
        ]
        pairs = tf.reshape(data[:, :-size], [-1, self.scales, 2])
        scales = tf.bitcast(pairs, tf.bfloat16)
        return self._decode(layout.fill(codes), scales, layout)

    def _padded(self, count: int) -> int:
        """Return `count`, rounded up so that the codes fill whole bytes."""
        return count + -count % (8 // self.width)

    def _to_bytes(self, codes: tf.Tensor) -> tf.Tensor:
        """Pack the codes of each row into bytes.

        A row is split into equal parts, and byte j holds code j of each part.
        """
        parts = tf.split(codes, 8 // self.width, axis=1)
        # The bits do not overlap, so adding joins them.
        return tf.add_n(
            [part * (1 << self.width * i) for i, part in enumerate(parts)]
        )

    def _from_bytes(self, data: tf.Tensor) -> tf.Tensor:
        lowest = np.uint8((1 << self.width) - 1)
        parts = [
            tf.bitwise.bitwise_and(
                tf.bitwise.right_shift(data, np.uint8(self.width * i)), lowest
            )
            for i in range(8 // self.width)
        ]
        return tf.concat(parts, 1)

    def _encode(self, chunks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the codes and the bfloat16 scales of chunks."""
        is_broken = tf.reduce_any(
            ~tf.math.is_finite(chunks), axis=1, keepdims=True
        )
        codes, scales = self.encode(chunks)
        scales = tf.where(is_broken, float("inf"), scales)
        codes = tf.cond(
            tf.reduce_any(is_broken),
            lambda: tf.where(is_broken, _not_finite_index(chunks), codes),
            lambda: codes,
        )
        return codes, tf.cast(scales, tf.bfloat16)

    def _decode(
        self, codes: tf.Tensor, scales: tf.Tensor, layout: Layout
    ) -> list[tf.Tensor]:
        scales = tf.cast(scales, tf.float32)
        is_broken = tf.math.is_inf(scales[:, :1])
        chunks = self.decode(codes, scales, layout)
        chunks = tf.cond(
            tf.reduce_any(is_broken),
            lambda: tf.where(is_broken, _from_not_finite_index(codes), chunks),
            lambda: chunks,
        )
        return layout.strip(chunks)


class Int4(Chunked):
    """Encodes a value as one of 15 equally spaced values around 0."""

    width, scales = 4, 1

    def encode(self, chunks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the uint8 codes of chunks, and scales [chunks, 1]."""
        largest = tf.reduce_max(tf.abs(chunks), axis=1, keepdims=True)
        scale = _in_range(tf.minimum(largest / 7.0, _LARGEST_STEP))
        steps = tf.round(tf.math.divide_no_nan(chunks, scale))
        return tf.cast(steps + 7.0, tf.uint8), scale

    def decode(
        self, codes: tf.Tensor, scales: tf.Tensor, layout: Layout
    ) -> tf.Tensor:
        """Return the values of chunks, with 0 for entries at position -1."""
        # Entries at position -1 were encoded as zeros. The product is exact:
        # its factors have 3 and 8 significant bits.
        return (tf.cast(codes, tf.float32) - 7.0) * scales


class Int2(Chunked):
    """Encodes a value as a sign and one of two mean magnitudes."""

    width, scales = 2, 2

    def encode(self, chunks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the uint8 codes of chunks, and scales [chunks, 2]."""
        magnitudes = tf.abs(chunks)
        largest = tf.reduce_max(magnitudes, axis=1, keepdims=True)
        # The sum of relative magnitudes cannot overflow. `_mean` ignores zeros.
        relative = tf.math.divide_no_nan(magnitudes, largest)
        is_high = relative >= _mean(relative)
        means = [
            _mean(tf.where(is_high, 0.0, relative)),
            _mean(tf.where(is_high, relative, 0.0)),
        ]
        scales = tf.concat(means, 1) * largest
        codes = tf.cast(is_high, tf.uint8) + 2 * tf.cast(chunks < 0, tf.uint8)
        return codes, _in_range(scales)

    def decode(
        self, codes: tf.Tensor, scales: tf.Tensor, layout: Layout
    ) -> tf.Tensor:
        """Return the values of chunks, with 0 for entries at position -1."""
        is_high = tf.bitwise.bitwise_and(codes, np.uint8(1)) == 1
        chunks = tf.where(is_high, scales[:, 1:], scales[:, :1])
        chunks = tf.where(codes < 2, chunks, -chunks)
        return tf.where(layout.is_empty(), 0.0, chunks)


CODES: dict[str, Float | Int4 | Int2] = {
    "float32": Float(tf.float32),
    "float16": Float(tf.float16),
    "bfloat16": Float(tf.bfloat16),
    "int4": Int4(),
    "int2": Int2(),
}


def _in_range(scales: tf.Tensor) -> tf.Tensor:
    """Limit scales to bfloat16's range, set tiny ones to 0, and round them."""
    scales = tf.minimum(scales, tf.cast(tf.bfloat16.max, tf.float32))
    scales = tf.where(scales < _SMALLEST_SCALE, 0.0, scales)
    return tf.cast(tf.cast(scales, tf.bfloat16), tf.float32)


def _mean(numbers: tf.Tensor) -> tf.Tensor:
    """Return the mean of each chunk's positive numbers; 0 if it has none."""
    count = tf.reduce_sum(tf.sign(numbers), axis=1, keepdims=True)
    total = tf.reduce_sum(numbers, axis=1, keepdims=True)
    return tf.math.divide_no_nan(total, count)


def _not_finite_index(values: tf.Tensor) -> tf.Tensor:
    """Return the index of each value in `_NOT_FINITE`; 0 if finite."""
    kinds = tf.where(values > 0, 2, tf.where(values < 0, 3, 1))
    kinds = tf.where(tf.math.is_finite(values), 0, kinds)
    return tf.cast(kinds, tf.uint8)


def _from_not_finite_index(codes: tf.Tensor) -> tf.Tensor:
    kinds = tf.cast(codes % len(_NOT_FINITE), tf.int32)
    return tf.gather(tf.constant(_NOT_FINITE), kinds)
