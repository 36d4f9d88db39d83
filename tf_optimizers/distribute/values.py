"""How the values of entries are sent: as floats, or in a few bits.

In few bits, 64 consecutive entries of a tensor are a chunk, with a scale:

    int4   a sign, and one of eight equally spaced magnitudes from 0 to the
           largest of the chunk
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
from typing import NamedTuple

import tensorflow as tf

from tf_optimizers.distribute.bits import from_planes, to_planes

CHUNK = 64

# Smaller scales count as 0: some threads take denormal numbers for 0, some do
# not, and all must read the same.
_LEAST = 2.0**-120
_NOT_FINITE = (0.0, float("nan"), float("inf"), float("-inf"))


class Written(NamedTuple):
    """Values as they are sent, [rows, any]."""

    data: tf.Tensor  # uint8
    bits: tf.Tensor  # bool


class ValueCode(abc.ABC):
    """How values are sent: those of several tensors, each of them [rows, n].

    `positions` are int, of the same shapes, -1 where there is no entry.
    """

    @abc.abstractmethod
    def byte_size(self, count: int) -> int:
        """Return the bytes of so many values of a tensor."""

    @abc.abstractmethod
    def bit_size(self, count: int) -> int:
        """Return the bits that they take besides."""

    @abc.abstractmethod
    def round(
        self, values: Sequence[tf.Tensor], positions: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return float32 values as they arrive."""

    @abc.abstractmethod
    def write(self, values: Sequence[tf.Tensor]) -> Written:
        """Return what is sent of values that were rounded."""

    @abc.abstractmethod
    def read(
        self, written: Written, positions: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the values that were written."""


class Floats(ValueCode):
    """Values as floats of a dtype."""

    def __init__(self, dtype: tf.DType) -> None:
        self.dtype = dtype

    def byte_size(self, count: int) -> int:
        """Return the bytes of so many values of a tensor."""
        return count * self.dtype.size

    def bit_size(self, count: int) -> int:
        """Return 0."""
        del count
        return 0

    def round(
        self, values: Sequence[tf.Tensor], positions: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Finite values beyond the range become the largest there is."""
        if self.dtype == tf.float32:
            return list(values)
        every = tf.concat(values, 1)
        limit = tf.cast(self.dtype.max, tf.float32)
        inside = tf.clip_by_value(every, -limit, limit)
        every = tf.where(tf.math.is_finite(every), inside, every)
        return _split(tf.cast(every, self.dtype), positions)

    def write(self, values: Sequence[tf.Tensor]) -> Written:
        """Return the bytes of values."""
        data = tf.bitcast(tf.concat(values, 1), tf.uint8)
        rows = data.shape[0]
        return Written(
            tf.reshape(data, [rows, -1]), tf.zeros([rows, 0], tf.bool)
        )

    def read(
        self, written: Written, positions: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the values that were written."""
        rows = written.data.shape[0]
        each = tf.reshape(written.data, [rows, -1, self.dtype.size])
        return _split(tf.bitcast(each, self.dtype), positions)


class Chunks(ValueCode):
    """Values as codes of a few bits, and scales of chunks.

    Subclasses have:
        width: Bits of a code.
        scales: How many a chunk has.
        factors: What each code multiplies its scale by.
    """

    width: int
    scales: int
    factors: tuple[float, ...]

    @abc.abstractmethod
    def encode(self, magnitudes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return codes of chunks of magnitudes, and [chunks, scales]."""

    @abc.abstractmethod
    def scale_of(self, codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
        """Return the scale that each code multiplies."""

    def byte_size(self, count: int) -> int:
        """Return the bytes of the scales."""
        return self.scales * tf.bfloat16.size * -(-count // CHUNK)

    def bit_size(self, count: int) -> int:
        """Return the bits of the codes."""
        return self.width * count

    def round(
        self, values: Sequence[tf.Tensor], positions: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return float32 values as they arrive.

        To round these, or to write them, changes nothing more: the largest
        magnitude of a chunk, and the mean of equal ones, are its scales.
        """
        codes, scales = self._encode(_fill(values))
        return self._decode(codes, scales, positions)

    def write(self, values: Sequence[tf.Tensor]) -> Written:
        """Return the bytes of scales, and the bits of codes."""
        codes, scales = self._encode(_fill(values))
        bits = to_planes(tf.concat(_strip(codes, values), 1), self.width)
        data = tf.bitcast(scales, tf.uint8)
        return Written(tf.reshape(data, [bits.shape[0], -1]), bits)

    def read(
        self, written: Written, positions: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the values that were written."""
        count = written.bits.shape[1] // self.width
        codes = from_planes(written.bits, self.width, count)
        pairs = tf.reshape(written.data, [-1, self.scales, tf.bfloat16.size])
        return self._decode(
            _fill(_split(codes, positions)),
            tf.bitcast(pairs, tf.bfloat16),
            positions,
        )

    def _encode(self, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return codes of chunks of values, int32, and bfloat16 scales."""
        is_broken = tf.reduce_any(
            ~tf.math.is_finite(values), axis=1, keepdims=True
        )
        codes, scales = self.encode(tf.abs(values))
        codes += (1 << self.width - 1) * tf.cast(values < 0, tf.int32)
        scales = tf.where(is_broken, float("inf"), scales)
        codes = tf.cond(
            tf.reduce_any(is_broken),
            lambda: tf.where(is_broken, _kinds(values), codes),
            lambda: codes,
        )
        return codes, tf.cast(scales, tf.bfloat16)

    def _decode(
        self,
        codes: tf.Tensor,
        scales: tf.Tensor,
        positions: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Return the values of chunks of codes, 0 where there is no entry."""
        is_broken = tf.math.is_inf(tf.cast(scales[:, :1], tf.float32))
        table = tf.constant([*self.factors, *_NOT_FINITE])
        factors = tf.gather(
            table, codes + tf.where(is_broken, len(self.factors), 0)
        )
        scales = tf.where(is_broken, 1.0, tf.cast(scales, tf.float32))
        values = factors * self.scale_of(codes, scales)
        # A code of few bits may have no 0.
        values = tf.where(_fill(positions) < 0, 0.0, values)
        return _strip(values, positions)


class Steps(Chunks):
    """A sign, and one of eight equally spaced magnitudes."""

    width, scales = 4, 1
    factors = tuple(sign * step / 7 for sign in (1, -1) for step in range(8))

    def encode(self, magnitudes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return codes of chunks of magnitudes, and [chunks, 1] scales."""
        largest = tf.reduce_max(magnitudes, axis=1, keepdims=True)
        scale = _in_range(largest)
        steps = tf.round(tf.math.divide_no_nan(7.0 * magnitudes, scale))
        return tf.cast(tf.minimum(steps, 7.0), tf.int32), scale

    def scale_of(self, codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
        """Return the scale that each code multiplies."""
        del codes
        return scales


class Means(Chunks):
    """A sign, and one of two magnitudes: either is a mean."""

    width, scales = 2, 2
    factors = (1.0, 1.0, -1.0, -1.0)

    def encode(self, magnitudes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return codes of chunks of magnitudes, and [chunks, 2] scales."""
        largest = tf.reduce_max(magnitudes, axis=1, keepdims=True)
        # Shares of it have a sum, whatever the magnitudes. Zeros do not count.
        share = tf.math.divide_no_nan(magnitudes, largest)
        is_high = share >= _mean(share)
        means = [
            _mean(tf.where(is_high, 0.0, share)),
            _mean(tf.where(is_high, share, 0.0)),
        ]
        scales = tf.concat(means, 1) * largest
        return tf.cast(is_high, tf.int32), _in_range(scales)

    def scale_of(self, codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
        """Return the scale that each code multiplies."""
        return tf.where(codes % 2 == 1, scales[:, 1:], scales[:, :1])


CODES: dict[str, ValueCode] = {
    "float32": Floats(tf.float32),
    "float16": Floats(tf.float16),
    "bfloat16": Floats(tf.bfloat16),
    "int4": Steps(),
    "int2": Means(),
}


def value_code(name: str) -> ValueCode:
    """Return one of `CODES`, or floats of another dtype as they are."""
    return CODES.get(name) or Floats(tf.as_dtype(name))


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
    return tf.where(tf.math.is_finite(values), 0, kinds)


def _fill(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the chunks of tensors, [all, CHUNK], each filled up with zeros."""
    filled = []
    for part in parts:
        rows, count = part.shape
        filled += [part, tf.zeros([rows, -count % CHUNK], part.dtype)]
    return tf.reshape(tf.concat(filled, 1), [-1, CHUNK])


def _strip(chunks: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return what `_fill` has filled up."""
    rows = like[0].shape[0]
    sizes = []
    for part in like:
        count = part.shape[1]
        sizes += [count, -count % CHUNK]
    return tf.split(tf.reshape(chunks, [rows, -1]), sizes, axis=1)[::2]


def _split(joined: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return tf.split(joined, [part.shape[1] for part in like], axis=1)
