"""Finds exactly the entries of largest magnitude.

    values ── sample ── threshold that more than k entries should reach
       │                   │
       └── maxima of blocks ── search the blocks that reach it
                                  └── candidates, a little more than k
                                         └── cut to exactly k

The sample affects only the number of candidates, and thus the time. A small k
needs no sample, since the k largest maxima show which blocks to search. For a
large k, all entries are searched, without blocks. On a GPU, sorting is fast and
waiting for the number of candidates is slow, so no sample is used.

Magnitudes are compared as integers, the bits of |x|. These integers have the
same order as |x|. NaN is above infinity, so NaNs are selected first.
"""

import math

import tensorflow as tf

from tf_optimizers.codes.positions import position_dtype
from tf_optimizers.kernels import compiled

# The sample should contain at least about this many of the k largest entries.
# The actual number is random; its standard deviation is about the square root
# of its mean. The threshold allows for four standard deviations, so there are
# rarely fewer than k candidates. If there are fewer, a second search among all
# entries gives the exact result.
_LARGEST_IN_SAMPLE = 128
_DEVIATIONS = 4
# The largest distance between samples, before `_stride` adds to it. With a
# smaller distance, there are more samples but fewer needless candidates. A
# candidate costs as much as 4 samples.
_STRIDE = 128

# Entries per block, one cache line. Searching a block takes as long as skipping
# 128 entries.
_BLOCK = 16
_SEARCH_COST = 128
# If k is below this number, and small compared with the number of values,
# sorting maxima is faster than sampling.
_LEAST_TO_SAMPLE = 1536

_SMALLEST = 1  # The bits of the smallest magnitude above 0.


def top_k(
    values: tf.Tensor, k: int, seed: tf.Tensor, gpu: bool = False
) -> tf.Tensor:
    """Return the positions of the k largest magnitudes, in increasing order.

    Zeros are never selected: if there are too few other entries, the first
    positions are -1. Among equal magnitudes, the first are selected.

    Args:
        values: float32 [size].
        k: int in [1, size].
        seed: int32 [2]. Decides where sampling starts; does not affect the
            result.
        gpu: Whether this runs on a GPU, inside an XLA kernel. Defaults to
            `False`.

    Returns:
        int64 [k].
    """
    is_rare = k * _SEARCH_COST <= values.shape[0]
    if gpu or k < (_LEAST_TO_SAMPLE if is_rare else 2 * _LARGEST_IN_SAMPLE):
        return _search(values, k, gpu)
    threshold = _threshold(values, k, seed)
    find = _find_in_blocks if is_rare else _find
    candidates = find(values, threshold)
    missed = (tf.size(candidates) < k) & (threshold > _SMALLEST)
    candidates = tf.cond(
        missed, lambda: _find(values, _SMALLEST), lambda: candidates
    )
    found = tf.cond(
        tf.size(candidates) > k,
        lambda: _cut(candidates, magnitude(tf.gather(values, candidates)), k),
        lambda: candidates,
    )
    missing = [[k - tf.size(found), 0]]
    return tf.ensure_shape(tf.pad(found, missing, constant_values=-1), [k])


def _search(values: tf.Tensor, k: int, gpu: bool) -> tf.Tensor:
    """Return the result of `top_k`, from the blocks with the largest maxima.

    The k largest entries are in k such blocks: each of these blocks has an
    entry that no entry of the remaining blocks exceeds.
    """
    rows = tf.reshape(
        tf.pad(values, [[0, -values.shape[0] % _BLOCK]]), [-1, _BLOCK]
    )
    reached = tf.range(rows.shape[0])
    if k < rows.shape[0]:
        maxima = compiled(_row_maxima, rows, gpu)(rows)
        reached = _sorted(tf.math.top_k(maxima, k, sorted=False).indices)
    candidates = magnitude(tf.reshape(tf.gather(rows, reached), [-1]))
    found, inside = tf.math.top_k(candidates, k, sorted=False)
    dtype = position_dtype(values.shape[0])
    blocks = tf.cast(tf.gather(reached, inside // _BLOCK), dtype)
    positions = blocks * _BLOCK + tf.cast(inside % _BLOCK, dtype)
    positions = _sorted(tf.where(found >= _SMALLEST, positions, -1))
    return tf.cast(positions, tf.int64)


def _sorted(positions: tf.Tensor) -> tf.Tensor:
    """Sort positions, with half the operations of `tf.sort`."""
    return -tf.math.top_k(-positions, positions.shape[0]).values


def magnitude(values: tf.Tensor) -> tf.Tensor:
    """Return |values| as int32 numbers that have the same order."""
    return tf.bitwise.bitwise_and(tf.bitcast(values, tf.int32), tf.int32.max)


def _find(values: tf.Tensor, threshold: tf.Tensor | int) -> tf.Tensor:
    """Return the positions of magnitudes that reach a threshold."""
    reaches = compiled(_reaches, values)(values, threshold)
    return tf.where(reaches)[:, 0]


def _find_in_blocks(values: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """Return the result of `_find`, faster if the threshold is high."""
    whole = values.shape[0] // _BLOCK * _BLOCK
    rows = tf.reshape(values[:whole], [-1, _BLOCK])
    maxima = compiled(_row_maxima, rows, False)(rows)
    reached = tf.where(maxima >= tf.cast(threshold, maxima.dtype))[:, 0]
    inside = tf.where(_reaches(tf.gather(rows, reached), threshold))
    positions = tf.gather(reached, inside[:, 0]) * _BLOCK + inside[:, 1]
    if whole == values.shape[0]:
        return positions
    rest = tf.where(_reaches(values[whole:], threshold))[:, 0]
    return tf.concat([positions, whole + rest], 0)


def _reaches(values: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    return magnitude(values) >= threshold


def _row_maxima(gpu: bool, rows: tf.Tensor) -> tf.Tensor:
    """Return the largest magnitude of each row.

    Magnitudes are integers. XLA does not vectorize maxima of integers on a CPU,
    so the magnitudes are converted to float64 there. This conversion is exact.
    """
    magnitudes = magnitude(rows)
    if not gpu:
        magnitudes = tf.cast(magnitudes, tf.float64)
    return tf.reduce_max(magnitudes, axis=1)


def _threshold(values: tf.Tensor, k: int, seed: tf.Tensor) -> tf.Tensor:
    """Return a magnitude that a little more than k entries should reach."""
    stride = _stride(values.shape[0], k)
    start = tf.random.stateless_uniform([], seed, 0, stride, tf.int32)
    expected = k / stride
    rank = math.ceil(expected + _DEVIATIONS * math.sqrt(expected))
    rank = min(rank, values.shape[0] // stride)
    sample = magnitude(values[start::stride])
    return tf.maximum(_largest(sample, rank), _SMALLEST)


def _stride(size: int, k: int) -> int:
    """Return the distance between samples.

    The distance has no factor in common with `size`. So all rows and columns of
    a matrix are sampled evenly.
    """
    stride = min(k // _LARGEST_IN_SAMPLE, _STRIDE)
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


def _largest(values: tf.Tensor, rank: int) -> tf.Tensor:
    """Return the `rank`-th largest value, counted from 1."""
    return tf.raw_ops.NthElement(input=values, n=rank - 1, reverse=True)


def _cut(candidates: tf.Tensor, magnitudes: tf.Tensor, k: int) -> tf.Tensor:
    """Return the k candidates of largest magnitude."""
    last = _largest(magnitudes, k)
    reaches = magnitudes >= last
    surplus = tf.math.count_nonzero(reaches, dtype=tf.int32) - k
    kept = tf.cond(
        surplus > 0,
        lambda: reaches & ~_last_of(magnitudes == last, surplus),
        lambda: reaches,
    )
    return tf.boolean_mask(candidates, kept)


def _last_of(ties: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return a mask of the last `count` True elements."""
    rank = tf.cumsum(tf.cast(ties, tf.int32), reverse=True)
    return ties & (rank <= count)
