"""The entries of largest magnitude: exactly, and without sorting them all.

    values ── sample ── threshold that more than k entries should reach
       └────── those that reach it: candidates, a little more than k
                   └── cut to exactly k by their own k-th magnitude

The sample only decides how many candidates there are, hence the time; what is
selected is exact. A few entries need no sample. Magnitudes are compared as the
bits of |x|, which order floats as their values do, and NaN above infinity: a
NaN is always selected.
"""

import math

import tensorflow as tf

from tf_optimizers.kernels import compiled

# Sampled entries among the k largest. Their number varies by its root, so the
# threshold is set four deviations lower; a miss costs time, not exactness.
_SAMPLED = 128
_DEVIATIONS = 4

_SMALLEST = 1  # As bits: any magnitude but 0.


def top_k(values: tf.Tensor, k: int, seed: tf.Tensor) -> tf.Tensor:
    """Return the positions of the k largest magnitudes, in rising order.

    Zeros are never among them, so that there may be fewer than k. Of equal
    magnitudes the first are taken.

    Args:
        values: float32 [size].
        k: int in [1, size].
        seed: int32 [2]. Where sampling starts; has no effect on the result.

    Returns:
        int64 [at most k].
    """
    if k < 2 * _SAMPLED:
        return _search(values, k)
    reaches = compiled(_reaches, values.shape, values.dtype)
    threshold = _threshold(values, k, seed)
    candidates = _positions(reaches(values, threshold))
    missed = (tf.size(candidates) < k) & (threshold > _SMALLEST)
    candidates = tf.cond(
        missed,
        lambda: _positions(reaches(values, _SMALLEST)),
        lambda: candidates,
    )
    return tf.cond(
        tf.size(candidates) > k,
        lambda: _cut(candidates, _magnitude(tf.gather(values, candidates)), k),
        lambda: candidates,
    )


def _search(values: tf.Tensor, k: int) -> tf.Tensor:
    """Return the positions by one look at all values; slow for a large k."""
    found, positions = tf.math.top_k(_magnitude(values), k, sorted=False)
    positions = tf.boolean_mask(positions, found >= _SMALLEST)
    return tf.cast(tf.sort(positions), tf.int64)


def _magnitude(values: tf.Tensor) -> tf.Tensor:
    """Return |values| as int32 that order like them."""
    return tf.bitwise.bitwise_and(tf.bitcast(values, tf.int32), tf.int32.max)


def _reaches(values: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    return _magnitude(values) >= threshold


def _positions(mask: tf.Tensor) -> tf.Tensor:
    return tf.where(mask)[:, 0]


def _threshold(values: tf.Tensor, k: int, seed: tf.Tensor) -> tf.Tensor:
    """Return a magnitude that k entries, and not many more, should reach."""
    stride = k // _SAMPLED
    start = tf.random.stateless_uniform([], seed, 0, stride, tf.int32)
    expected = k / stride
    rank = math.ceil(expected + _DEVIATIONS * math.sqrt(expected))
    rank = min(rank, values.shape[0] // stride)
    sample = _magnitude(values[start::stride])
    return tf.maximum(_largest(sample, rank), _SMALLEST)


def _largest(values: tf.Tensor, rank: int) -> tf.Tensor:
    """Return the value at a rank, from 1."""
    return tf.raw_ops.NthElement(input=values, n=rank - 1, reverse=True)


def _cut(candidates: tf.Tensor, magnitude: tf.Tensor, k: int) -> tf.Tensor:
    """Return the k candidates of largest magnitude."""
    last = _largest(magnitude, k)
    above = magnitude > last
    tied = magnitude == last
    room = k - tf.math.count_nonzero(above, dtype=tf.int32)
    fits = tf.cumsum(tf.cast(tied, tf.int32)) <= room
    return tf.boolean_mask(candidates, above | (tied & fits))
