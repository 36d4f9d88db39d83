"""What replicas pack is what all unpack: values, indices, dtypes, order."""

import numpy as np
import pytest
import tensorflow as tf
from programs import transport

import tf_optimizers as tfo
from tf_optimizers.distribute.entries import SortedEntries, packed_bytes
from tf_optimizers.distribute.sparse_all_reduce import pack, unpack

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def make_slices(rng, rows, kind, value_dtype, index_dtype, row_shape):
    values = rng.standard_normal([rows, *row_shape])
    return kind(
        tf.cast(values, value_dtype),
        tf.constant(np.sort(rng.integers(0, 100, rows)), index_dtype),
        tf.constant([100, *row_shape], tf.int64),
    )


def gather(per_replica):
    """Pack on every replica, concatenate, unpack on the first."""
    rows = [
        tf.stack([tf.shape(p.indices)[0] for p in parts])
        for parts in zip(*per_replica, strict=True)
        if not isinstance(parts[0], SortedEntries)
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
    kinds = [SortedEntries, tf.IndexedSlices, tf.IndexedSlices, SortedEntries]
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


def test_no_rows_on_any_replica_are_padded():
    """TensorFlow's all-gather of nothing is a segmentation fault."""
    slices = tf.IndexedSlices(
        tf.zeros([0, 3]), tf.zeros([0], tf.int64), tf.constant([100, 3])
    )
    rows = [tf.constant([0, 0])]
    assert tf.size(pack([slices], rows)) == 4  # A row and its index.
    (result,) = gather([[slices], [slices]])
    assert result.values.shape == [0, 3]
    assert result.indices.shape == [0]


def test_bits_survive():
    """Denormal numbers and the payload of a NaN are not arithmetic's."""
    bits = tf.constant([0x7FC12345, 1, -(2**31), 0x7F800000], tf.int32)
    slices = SortedEntries(
        tf.bitcast(bits, tf.float32), tf.range(4), tf.constant([9])
    )
    (result,) = gather([[slices], [slices]])
    np.testing.assert_array_equal(
        tf.bitcast(result.values, tf.int32), tf.tile(bits, [2])
    )


@pytest.mark.parametrize(
    ("dtype", "pair"), [("float32", 6), ("float16", 4), ("bfloat16", 4)]
)
def test_pair_takes_2_bytes_and_its_value(dtype, pair):
    """And a count of each 65,536 elements 4 bytes."""
    sizes = {10**6: (1000, 16), 65536: (30, 1), 65537: (20, 2)}
    entries = [
        SortedEntries(
            tf.zeros([count], dtype), tf.range(count), tf.constant([size])
        )
        for size, (count, _) in sizes.items()
    ]
    expected = [count * pair + 4 * blocks for count, blocks in sizes.values()]
    assert tf.size(pack(entries, [])) * 4 == sum(expected)
    assert expected == [
        packed_bytes(size, count, tf.as_dtype(dtype))
        for size, (count, _) in sizes.items()
    ]


BLOCK = 65536
PLACES = {
    "ends of blocks": [0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 5 * BLOCK],
    "empty blocks": [4 * BLOCK + 7],
    "padded": [0, 0, 0, 3, 3 * BLOCK],
    "all of a block": list(range(BLOCK + 2)),
}


@pytest.mark.parametrize("replicas", [1, 3])
def test_positions_arrive_whatever_their_blocks(replicas):
    """Of several tensors at once, with other positions on every replica."""
    rng = np.random.default_rng(0)
    size = 5 * BLOCK + 1
    expected = [
        [
            np.array(places)
            if replica == 0
            else np.sort(rng.integers(0, size, len(places)))
            for places in PLACES.values()
        ]
        for replica in range(replicas)
    ]
    per_replica = [
        [
            SortedEntries(
                tf.random.stateless_normal([len(p)], [replica, i]),
                tf.constant(p),
                tf.constant([size]),
            )
            for i, p in enumerate(places)
        ]
        for replica, places in enumerate(expected)
    ]
    for i, result in enumerate(gather(per_replica)):
        parts = [entries[i] for entries in per_replica]
        for field in ("values", "indices"):
            np.testing.assert_array_equal(
                getattr(result, field),
                tf.concat([getattr(part, field) for part in parts], 0),
            )


def test_positions_that_int32_cannot_hold_are_kept():
    slices = SortedEntries(
        tf.zeros([2]), tf.constant([2**31 - 1, 2**32 + 1]), tf.constant([2**33])
    )
    (result,) = gather([[slices]])
    np.testing.assert_array_equal(result.indices, [2**31 - 1, 2**32 + 1])


@pytest.mark.parametrize(("size", "packs"), [(0, 1), (300, 3), (700, 2)])
def test_dense_values_travel_in_packs(monkeypatch, size, packs):
    """Of a replica of a strategy with this option, in a graph."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = tfo.SparseMultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=size
        )
    )

    def replica():
        tensors = [tf.ones(100) for _ in range(3)]
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tensors)

    step = tf.function(lambda: strategy.run(replica))
    collectives = transport.collectives_in(step.get_concrete_function().graph)
    assert collectives == {
        "CollectiveReduceV2": packs * strategy.num_replicas_in_sync
    }
