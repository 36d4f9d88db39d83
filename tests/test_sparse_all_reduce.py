"""What replicas pack is what all unpack: values, indices, dtypes, order."""

import numpy as np
import pytest
import tensorflow as tf

from tf_optimizers.distribute.sparse_all_reduce import (
    UniformSlices,
    pack,
    unpack,
)

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def make_slices(rng, rows, kind, value_dtype, index_dtype, row_shape):
    values = rng.standard_normal([rows, *row_shape])
    return kind(
        tf.cast(values, value_dtype),
        tf.constant(rng.integers(0, 100, rows), index_dtype),
        tf.constant([100, *row_shape], tf.int64),
    )


def gather(per_replica):
    """Pack on every replica, concatenate, unpack on the first."""
    rows = [
        None
        if isinstance(parts[0], UniformSlices)
        else tf.stack([tf.shape(p.indices)[0] for p in parts])
        for parts in zip(*per_replica, strict=True)
    ]
    words = [pack(slices, rows) for slices in per_replica]
    gathered = tf.reshape(tf.stack(words), [-1])  # Equally many of each.
    return unpack(gathered, per_replica[0], rows, len(per_replica))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("value_dtype", DTYPES)
def test_all_replicas_slices_arrive_in_order(value_dtype, index_dtype, graph):
    rng = np.random.default_rng(0)
    counts = [[3, 0, 4, 1], [3, 5, 0, 1], [3, 1, 2, 1]]
    shapes = [(), (3,), (2, 2), ()]
    kinds = [UniformSlices, tf.IndexedSlices, tf.IndexedSlices, UniformSlices]
    per_replica = [
        [
            make_slices(rng, n, kind, value_dtype, index_dtype, shape)
            for n, kind, shape in zip(rows, kinds, shapes, strict=True)
        ]
        for rows in counts
    ]
    function = (
        tf.function(lambda: gather(per_replica))
        if graph
        else lambda: gather(per_replica)
    )
    for i, result in enumerate(function()):
        parts = [slices[i] for slices in per_replica]
        assert result.values.dtype == value_dtype
        assert result.indices.dtype == index_dtype
        for field in ("values", "indices"):
            expected = tf.concat([getattr(p, field) for p in parts], 0)
            actual = getattr(result, field)
            np.testing.assert_array_equal(
                tf.cast(actual, "float64"), tf.cast(expected, "float64")
            )
        np.testing.assert_array_equal(result.dense_shape, parts[0].dense_shape)


def test_bits_survive():
    """Denormal numbers and the payload of a NaN are not arithmetic's."""
    bits = tf.constant([0x7FC12345, 1, -(2**31), 0x7F800000], tf.int32)
    slices = UniformSlices(
        tf.bitcast(bits, tf.float32), tf.range(4), tf.constant([9])
    )
    (result,) = gather([[slices], [slices]])
    np.testing.assert_array_equal(
        tf.bitcast(result.values, tf.int32), tf.tile(bits, [2])
    )


def test_pair_of_float32_and_position_takes_8_bytes():
    slices = UniformSlices(
        tf.zeros([50]), tf.range(50, dtype=tf.int64), tf.constant([10**6])
    )
    assert tf.size(pack([slices], [None])) * 4 == 50 * 8


def test_positions_that_int32_cannot_hold_are_kept():
    slices = UniformSlices(
        tf.zeros([1]), tf.constant([2**40]), tf.constant([2**41])
    )
    (result,) = gather([[slices]])
    np.testing.assert_array_equal(result.indices, [2**40])
