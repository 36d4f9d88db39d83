"""Bits, as booleans and as bytes: the first of eight is the lowest of a byte.

Tensors are [rows, ...], each row for itself.
"""

import numpy as np
import tensorflow as tf

# Of eight bytes that are 0 or 1, the product's highest byte has all the bits:
# byte i is moved by 56 - 7 i, hence to bit 56 + i, and nothing else gets there.
_GATHER = sum(1 << 56 - 7 * i for i in range(8))
# The product has a byte in all eight places, of which each keeps its own bit.
_SPREAD = sum(1 << 8 * i for i in range(8))
_OWN = sum(1 << 8 * i + i for i in range(8))
_HIGHEST = np.uint64(56)


def to_bytes(bits: tf.Tensor) -> tf.Tensor:
    """Return booleans [rows, n] as uint8 [rows, n / 8, rounded up]."""
    high = tf.bitwise.right_shift(_eights(bits) * _GATHER, _HIGHEST)
    return tf.cast(high, tf.uint8)


def from_bytes(data: tf.Tensor, count: int) -> tf.Tensor:
    """Return the first `count` bits of each row of `to_bytes`."""
    eight = tf.cast(data, tf.uint64) * _SPREAD
    own = tf.bitwise.bitwise_and(eight, np.uint64(_OWN))
    bits = tf.cast(tf.bitcast(own, tf.uint8), tf.bool)
    return tf.reshape(bits, [data.shape[0], -1])[:, :count]


def to_planes(numbers: tf.Tensor, width: int) -> tf.Tensor:
    """Return the lowest bits of int [rows, n], as booleans [rows, width n].

    The lowest bit of all numbers comes first, then the next of all.
    """
    rows, count = numbers.shape
    weights = _weights(width)
    numbers = tf.cast(numbers, weights.dtype)[:, tf.newaxis]
    bits = tf.bitwise.bitwise_and(numbers, weights) != 0
    return tf.reshape(bits, [rows, width * count])


def from_planes(bits: tf.Tensor, width: int, count: int) -> tf.Tensor:
    """Return the numbers of `to_planes`, int32 if they fit, or int64."""
    planes = tf.reshape(bits, [bits.shape[0], width, count])
    weights = _weights(width)
    return tf.reduce_sum(tf.cast(planes, weights.dtype) * weights, axis=1)


def set_bits(where: tf.Tensor, size: int) -> tf.Tensor:
    """Return booleans [rows, size] that are True at int64 [rows, n].

    Those of a row must not decrease.
    """
    rows = where.shape[0]
    flat = tf.reshape(where + _first(rows, size), [-1])
    # Takes a tenth of the time of a scatter; checked, it would refuse repeats.
    bits = tf.raw_ops.SparseToDense(
        sparse_indices=flat,
        output_shape=tf.constant([rows * size], tf.int64),
        sparse_values=True,
        default_value=False,
        validate_indices=False,
    )
    return tf.reshape(bits, [rows, size])


def where_set(bits: tf.Tensor, count: int) -> tf.Tensor:
    """Return where each row, which has `count` bits that are True, has them.

    As int32 if that holds them all, else as int64.
    """
    rows, size = bits.shape
    flat = tf.where(tf.reshape(bits, [-1]))
    dtype = integers(rows * size)
    found = tf.cast(tf.reshape(flat, [rows, count]), dtype)
    return found - tf.constant(_first(rows, size), dtype)


def count_set(bits: tf.Tensor) -> tf.Tensor:
    """Return how many bits of each row are True, [rows, 1]."""
    each = tf.raw_ops.PopulationCount(x=_eights(bits))
    each = tf.cast(each, integers(bits.shape[1]))
    return tf.reduce_sum(each, axis=1, keepdims=True)


def integers(end: int) -> tf.DType:
    """Return the integers that hold 0 to `end`."""
    return tf.int32 if end <= tf.int32.max else tf.int64


def _eights(bits: tf.Tensor) -> tf.Tensor:
    """Return each eight bits as the bytes of an uint64, 0 or 1."""
    rows, count = bits.shape
    size = -(-count // 8)
    bits = tf.pad(tf.cast(bits, tf.uint8), [[0, 0], [0, 8 * size - count]])
    return tf.bitcast(tf.reshape(bits, [rows, size, 8]), tf.uint64)


def _first(rows: int, size: int) -> np.ndarray:
    """Return the first address of each row."""
    return size * np.arange(rows, dtype="int64")[:, np.newaxis]


def _weights(width: int) -> tf.Tensor:
    """Return the powers of two of so many bits, [width, 1]."""
    dtype = "int32" if width < 32 else "int64"
    powers = 1 << np.arange(width, dtype=dtype)
    return tf.constant(powers[:, np.newaxis])
