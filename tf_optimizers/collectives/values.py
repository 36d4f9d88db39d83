"""Encodes values of entries: as floats, or in a few bits."""

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from tf_optimizers.collectives.chunks import Means, Steps


class ValueCode(Protocol):
    """How values are sent: those of several tensors, each of them [rows, n].

    `positions` are int, of the same shapes, -1 where there is no entry.
    """

    def byte_size(self, count: int) -> int:
        """Return the bytes of so many values of a tensor."""

    def round(
        self, values: Sequence[tf.Tensor], positions: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return float32 values as they arrive."""

    def write(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return uint8 [rows, any], what is sent of rounded values."""

    def read(
        self, data: tf.Tensor, positions: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the values that were written."""


class Floats:
    """Values as floats of a dtype."""

    def __init__(self, dtype: tf.DType) -> None:
        self.dtype = dtype

    def byte_size(self, count: int) -> int:
        """Return the bytes of so many values of a tensor."""
        return count * self.dtype.size

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

    def write(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the bytes of values."""
        data = tf.bitcast(tf.concat(values, 1), tf.uint8)
        return tf.reshape(data, [data.shape[0], -1])

    def read(
        self, data: tf.Tensor, positions: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the values that were written."""
        each = tf.reshape(data, [data.shape[0], -1, self.dtype.size])
        return _split(tf.bitcast(each, self.dtype), positions)


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


def _split(joined: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return tf.split(joined, [part.shape[1] for part in like], axis=1)
