"""Finds the entries of largest magnitude, exactly, without sorting them all.

    values ── sample ── threshold that more than k entries should reach
       │                   │
       └── maxima of blocks ── those that reach it: searched
                                  └── candidates, a little more than k
                                         └── cut to exactly k

The sample only decides how many candidates there are, hence the time; what is
selected is exact. A few entries need no sample, as the k largest maxima tell
which blocks to search, and many entries need no blocks. On a GPU, where it is
fast to sort, and slow to wait for the number of candidates, the maxima always
tell which blocks to search. Magnitudes are compared as the bits of |x|, which
order floats as their values do, and NaN above infinity: a NaN is always
selected.
"""

import math

import tensorflow as tf

from tf_optimizers.kernels import compiled

# Sampled entries among the k largest. Their number varies by its root, so the
# threshold is set four deviations lower; a miss costs time, not exactness.
_SAMPLED = 128
_DEVIATIONS = 4
# More of them, if no element in so many is passed over: then there are few
# candidates too many, of which each costs as much as it does to sample 4.
_STRIDE = 128

# Entries of a block, a cache line. To search a block takes as long as to pass
# over this many entries.
_BLOCK = 16
_PASSED_OVER = 128
# Up to so many rare entries, sorting maxima is faster than sampling.
_FEW = 1536

_SMALLEST = 1  # As bits: any magnitude but 0.


def top_k(
    values: tf.Tensor, k: int, seed: tf.Tensor, gpu: bool = False
) -> tf.Tensor:
    """Return the positions of the k largest magnitudes, in rising order.

    Zeros are never among them: if there are too few others, the first
    positions are -1. Of equal magnitudes the first are taken.

    Args:
        values: float32 [size].
        k: int in [1, size].
        seed: int32 [2]. Where sampling starts; has no effect on the result.
        gpu: Whether it runs on a GPU, inside an XLA kernel.

    Returns:
        int64 [k].
    """
    if gpu:
        return _search(values, k, gpu)
    is_rare = k * _PASSED_OVER <= values.shape[0]
    if k < (_FEW if is_rare else 2 * _SAMPLED):
        return _search(values, k)
    threshold = _threshold(values, k, seed)
    find = _find_in_blocks if is_rare else _find
    candidates = find(values, threshold)
    missed = (tf.size(candidates) < k) & (threshold > _SMALLEST)
    candidates = tf.cond(
        missed, lambda: _find(values, _SMALLEST), lambda: candidates
    )
    found = tf.cond(
        tf.size(candidates) > k,
        lambda: _cut(candidates, _magnitude(tf.gather(values, candidates)), k),
        lambda: candidates,
    )
    missing = [[k - tf.size(found), 0]]
    return tf.ensure_shape(tf.pad(found, missing, constant_values=-1), [k])


def _search(values: tf.Tensor, k: int, gpu: bool = False) -> tf.Tensor:
    """Return the positions of a few by sorting the maxima of blocks.

    The k largest entries lie in the k blocks of largest maxima: each of these
    has an entry that comes before all that the other blocks have.
    """
    rows = tf.reshape(
        tf.pad(values, [[0, -values.shape[0] % _BLOCK]]), [-1, _BLOCK]
    )
    reached = tf.range(rows.shape[0])
    if k < rows.shape[0]:
        maxima = compiled(_row_maxima, rows, gpu)(rows)
        reached = _sorted(tf.math.top_k(maxima, k, sorted=False).indices)
    candidates = _magnitude(tf.reshape(tf.gather(rows, reached), [-1]))
    found, inside = tf.math.top_k(candidates, k, sorted=False)
    positions = tf.gather(reached, inside // _BLOCK) * _BLOCK + inside % _BLOCK
    positions = _sorted(tf.where(found >= _SMALLEST, positions, -1))
    return tf.cast(positions, tf.int64)


def _sorted(positions: tf.Tensor) -> tf.Tensor:
    """Do what `tf.sort` does in twice as many operations."""
    return -tf.math.top_k(-positions, positions.shape[0]).values


def _magnitude(values: tf.Tensor) -> tf.Tensor:
    """Return |values| as int32 that order like them."""
    return tf.bitwise.bitwise_and(tf.bitcast(values, tf.int32), tf.int32.max)


def _find(values: tf.Tensor, threshold: tf.Tensor | int) -> tf.Tensor:
    """Return the positions of magnitudes that reach a threshold."""
    reaches = compiled(_reaches, values)(values, threshold)
    return tf.where(reaches)[:, 0]


def _find_in_blocks(values: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """Return the same as `_find`, faster if they are few."""
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
    return _magnitude(values) >= threshold


def _row_maxima(gpu: bool, rows: tf.Tensor) -> tf.Tensor:
    """Return the largest magnitude of each row.

    On a CPU as float64, which holds them exactly: there, XLA takes maxima of
    integers one by one, and those of float32 would not see a NaN.
    """
    magnitude = _magnitude(rows)
    if not gpu:
        magnitude = tf.cast(magnitude, tf.float64)
    return tf.reduce_max(magnitude, axis=1)


def _threshold(values: tf.Tensor, k: int, seed: tf.Tensor) -> tf.Tensor:
    """Return a magnitude that k entries, and not many more, should reach."""
    stride = _stride(values.shape[0], k)
    start = tf.random.stateless_uniform([], seed, 0, stride, tf.int32)
    expected = k / stride
    rank = math.ceil(expected + _DEVIATIONS * math.sqrt(expected))
    rank = min(rank, values.shape[0] // stride)
    sample = _magnitude(values[start::stride])
    return tf.maximum(_largest(sample, rank), _SMALLEST)


def _stride(size: int, k: int) -> int:
    """Return how far apart samples are.

    It has no factor in common with any axis of the variable, so that all its
    rows and columns, some of which may be 0, are sampled alike.
    """
    stride = min(k // _SAMPLED, _STRIDE)
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


def _largest(values: tf.Tensor, rank: int) -> tf.Tensor:
    """Return the value at a rank, from 1."""
    return tf.raw_ops.NthElement(input=values, n=rank - 1, reverse=True)


def _cut(candidates: tf.Tensor, magnitude: tf.Tensor, k: int) -> tf.Tensor:
    """Return the k candidates of largest magnitude."""
    last = _largest(magnitude, k)
    reaches = magnitude >= last
    surplus = tf.math.count_nonzero(reaches, dtype=tf.int32) - k
    kept = tf.cond(
        surplus > 0,
        lambda: reaches & ~_last_of(magnitude == last, surplus),
        lambda: reaches,
    )
    return tf.boolean_mask(candidates, kept)


def _last_of(ties: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return which are the last `count` that are True."""
    rank = tf.cumsum(tf.cast(ties, tf.int32), reverse=True)
    return ties & (rank <= count)
