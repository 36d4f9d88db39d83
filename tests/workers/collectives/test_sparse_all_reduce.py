"""All replicas unpack the packed values, indices and dtypes, in order."""

import numpy as np
import pytest
import tensorflow as tf
from cases import with_long
from scripts import transport

import tf_optimizers as tfo
from tf_optimizers.codes.entries import Entries
from tf_optimizers.codes.values import CODES
from tf_optimizers.replicas import replicas_of
from tf_optimizers.workers.collectives.message import (
    ROUND_BYTES,
    Content,
    is_gathered,
    layout,
    pack,
    sum_duplicates,
    unpack,
)

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def make_part(rng, rows, value_dtype, index_dtype, row_shape):
    """Return slices if there is a `row_shape`, entries otherwise."""
    shape = () if row_shape is None else row_shape
    values = tf.cast(rng.standard_normal([rows, *shape]), value_dtype)
    indices = tf.constant(np.sort(rng.integers(0, 100, rows)), index_dtype)
    if row_shape is None:
        code = value_dtype if value_dtype in CODES else "float32"
        return Entries(tf.cast(values, code), indices, 100, code)
    dense_shape = tf.constant([100, *row_shape], tf.int64)
    return tf.IndexedSlices(values, indices, dense_shape)


def fields(part):
    return part.values, part[1] if isinstance(part, Entries) else part.indices


def gather(per_replica):
    """Pack on every replica, concatenate, unpack on the first.

    On each replica, entries come first.
    """
    entries, slices = (
        [
            [p for p in parts if isinstance(p, Entries) == of_kind]
            for parts in per_replica
        ]
        for of_kind in (True, False)
    )
    rows = [
        tf.stack([tf.shape(p.indices)[0] for p in parts])
        for parts in zip(*slices, strict=True)
    ]
    contents = [
        Content(e, s, rows=rows) for e, s in zip(entries, slices, strict=True)
    ]
    words = list(map(pack, contents))
    gathered = tf.reshape(tf.stack(words), [-1])  # All are equally long.
    found = unpack(gathered, contents[0], len(per_replica))
    return [*found[0], *found[1]]


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("value_dtype", with_long(DTYPES, DTYPES[1::2]))
def test_all_replicas_slices_arrive_in_order(value_dtype, index_dtype):
    rng = np.random.default_rng(0)
    counts = [[3, 1, 0, 4], [3, 1, 5, 0], [3, 1, 1, 2]]
    shapes = [None, None, (3,), (2, 2)]
    per_replica = [
        [
            make_part(rng, n, value_dtype, index_dtype, shape)
            for n, shape in zip(rows, shapes, strict=True)
        ]
        for rows in counts
    ]
    function = tf.function(lambda: gather(per_replica))
    for i, result in enumerate(function()):
        parts = [slices[i] for slices in per_replica]
        for actual, *every in zip(*map(fields, (result, *parts)), strict=True):
            assert actual.dtype == every[0].dtype
            np.testing.assert_array_equal(
                tf.cast(actual, "float64"),
                tf.cast(tf.concat(every, 0), "float64"),
            )
        if shapes[i] is None:
            assert result.size == parts[0].size
        else:
            np.testing.assert_array_equal(
                result.dense_shape, parts[0].dense_shape
            )


def test_no_rows_on_any_replica_are_padded():
    """TensorFlow's all-gather of empty tensors is a segmentation fault."""
    slices = tf.IndexedSlices(
        tf.zeros([0, 3]), tf.zeros([0], tf.int64), tf.constant([100, 3])
    )
    rows = [tf.constant([0, 0])]
    # One row and its index.
    assert tf.size(pack(Content(slices=[slices], rows=rows))) == 3 + 1
    (result,) = gather([[slices], [slices]])
    assert result.values.shape == [0, 3]
    assert result.indices.shape == [0]


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("value_dtype", [*DTYPES, "int32"])
def test_duplicate_rows_are_summed(value_dtype, index_dtype):
    rows = tf.constant([7, 2, 7, 0, 2, 7], index_dtype)
    values = tf.cast(tf.reshape(2 ** tf.range(12), [6, 2]), value_dtype)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 2], value_dtype),
            tf.TensorSpec([None], index_dtype),
        ]
    )
    def once(values, rows):
        result = sum_duplicates(
            tf.IndexedSlices(values, rows, tf.constant([9, 2]))
        )
        assert result.values.shape.as_list() == [None, 2]
        return result

    result = once(values, rows)
    assert (result.values.dtype, result.indices.dtype) == (
        value_dtype,
        index_dtype,
    )
    np.testing.assert_array_equal(result.indices, [7, 2, 0])
    sums = [[1 + 16 + 1024, 2 + 32 + 2048], [4 + 256, 8 + 512], [64, 128]]
    np.testing.assert_array_equal(
        tf.cast(result.values, "float64"),
        tf.cast(tf.cast(tf.constant(sums), value_dtype), "float64"),
    )
    nothing = once(values[:0], rows[:0])
    assert nothing.values.shape == [0, 2]


def test_many_duplicate_rows_of_half_precision_are_summed():
    """In bfloat16, 256 + 1 is 256."""
    ones = tf.ones([1024, 1], "bfloat16")
    part = tf.IndexedSlices(ones, tf.zeros([1024], tf.int64))
    assert float(sum_duplicates(part).values[0, 0]) == 1024


def test_bits_survive():
    """Arithmetic would change denormal numbers and the payload of a NaN."""
    bits = tf.constant([0x7FC12345, 1, -(2**31), 0x7F800000], tf.int32)
    entries = Entries(tf.bitcast(bits, tf.float32), tf.range(4), 9)
    (result,) = gather([[entries], [entries]])
    np.testing.assert_array_equal(
        tf.bitcast(result.values, tf.int32), tf.tile(bits, [2])
    )


@pytest.mark.parametrize(
    "other",
    [
        [tf.ones([4], tf.float16), tf.ones([2])],
        [tf.ones([3], tf.bfloat16), tf.ones([2])],
        [tf.ones([3], tf.float16), tf.ones([1, 2])],
        [tf.ones([3], tf.float16), tf.ones([2], tf.int32)],
    ],
    ids=["size", "half", "shape", "dtype"],
)
def test_message_of_as_many_words_has_another_layout(other):
    """Its bits would be read as numbers of other variables."""
    own = [[tf.ones([3], tf.float16)], [tf.ones([2])]]
    groups = [[tensor] for tensor in other]
    sizes = [tf.size(pack(Content(groups=g))) for g in (own, groups)]
    assert sizes == [4, 4]
    assert layout(Content(groups=own)) != layout(Content(groups=groups))


def test_positions_that_int32_cannot_hold_are_kept():
    entries = Entries(tf.zeros([2]), tf.constant([2**31 - 1, 2**32 + 1]), 2**33)
    (result,) = gather([[entries]])
    np.testing.assert_array_equal(result.positions, [2**31 - 1, 2**32 + 1])


LARGE = 100_000  # 400 kB, too many to be gathered.


@pytest.fixture
def make_strategy(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)

    def make(**options):
        return tfo.SparseMultiWorkerMirroredStrategy(
            communication_options=(
                tf.distribute.experimental.CommunicationOptions(**options)
            )
        )

    return make


def collectives_of(strategy, *tensors):
    """Return the collectives of a sum in a graph, by replica and kind."""

    def replica():
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", list(tensors))

    step = tf.function(lambda: strategy.run(replica))
    found = transport.collectives_in(step.get_concrete_function().graph)
    replicas = strategy.num_replicas_in_sync
    return {kind: count // replicas for kind, count in found.items()}


@pytest.mark.parametrize(("size", "packs"), [(0, 1), (300, 3), (700, 2)])
def test_large_dense_values_travel_in_packs(make_strategy, size, packs):
    """Count packs of a replica in a graph, with this option."""
    strategy = make_strategy(bytes_per_pack=1000 * size)
    tensors = [tf.ones(LARGE) for _ in range(3)]
    found = collectives_of(strategy, *tensors)
    assert found == {"CollectiveReduceV2": packs}


def hints_in(function, *arguments):
    """Return the implementations that the collectives of a graph request."""
    definition = function.get_concrete_function(*arguments).graph.as_graph_def()
    nodes = list(definition.node)
    for each in definition.library.function:
        nodes += each.node_def
    return {
        node.attr["communication_hint"].s.decode()
        for node in nodes
        if node.op.startswith("Collective")
    }


def test_only_collectives_of_a_step_are_by_nccl(make_strategy, monkeypatch):
    """Two NCCL groups on the same GPUs at the same time may deadlock."""
    strategy = make_strategy(implementation="NCCL")
    extended = strategy.extended

    def sums(tensor):
        total = tf.distribute.get_replica_context().all_reduce("SUM", tensor)
        return total, *replicas_of().sum_on_worker([tensor])

    large = tf.ones([LARGE])
    step = tf.function(lambda: strategy.run(sums, (large,)))
    assert hints_in(step) == {"nccl"}

    def gather():
        with replicas_of().on_later_channel():
            # The number of rows is unknown, so the launcher uses a collective
            # that also runs on GPUs.
            return replicas_of().gather(tf.boolean_mask(large, large > 0))

    later = tf.function(lambda: strategy.run(gather))
    assert hints_in(later) == {"ring"}
    monkeypatch.setattr(type(extended), "workers", 2)
    parallel = tf.function(
        lambda: extended.reduce_in_parallel(
            "SUM", strategy.run(lambda: tf.ones([1]))
        )
    )
    ahead = tf.function(
        lambda: extended.gather_copies(extended._input_channel, [large] * 2)
    )
    assert hints_in(parallel) == hints_in(ahead) == {"ring"}


def test_small_dense_values_of_all_dtypes_travel_together(make_strategy):
    strategy = make_strategy()
    small = [tf.ones([3, 2], dtype) for dtype in (*DTYPES, "int64")]
    assert collectives_of(strategy, *small) == {"CollectiveGatherV2": 1}
    large = tf.ones([LARGE])
    assert collectives_of(strategy, *small, large) == {
        "CollectiveGatherV2": 1,
        # The small tensors of its dtype travel with it.
        "CollectiveReduceV2": 1,
    }


@pytest.mark.parametrize("replicas", [2, 8])
def test_dense_values_are_gathered_if_worth_two_rounds(replicas):
    elements = 2 * ROUND_BYTES // (replicas - 1) // 4
    assert is_gathered([tf.ones([elements - 3]), tf.ones([3])], replicas)
    assert not is_gathered([tf.ones([elements]), tf.ones([1])], replicas)
    # Empty tensors are not, nor dtypes that TensorFlow cannot sum.
    assert not is_gathered([tf.ones([0])], replicas)
    assert not is_gathered([tf.constant([True])], replicas)


@pytest.mark.parametrize("dtype", [*DTYPES, "int32", "int64"])
def test_dense_values_are_summed_as_by_add_n(dtype):
    """Sums are bitwise equal, although sums of floats depend on the order."""
    rng = np.random.default_rng(0)
    shapes = [(5,), (), (2, 3)]
    per_replica = [
        [tf.cast(100 * rng.standard_normal(s), dtype) for s in shapes]
        for _ in range(11)
    ]
    words = tf.concat([pack(Content(groups=[r])) for r in per_replica], 0)
    _, _, (sums,) = unpack(words, Content(groups=[per_replica[3]]), 11)
    differs = False
    for found, *values in zip(sums, *per_replica, strict=True):
        expected = tf.add_n(values)
        assert found.dtype == dtype and found.shape == values[0].shape
        np.testing.assert_array_equal(
            tf.cast(found, "float64"), tf.cast(expected, "float64")
        )
        other = tf.add_n(values[::-1])
        differs |= bool(tf.reduce_any(found != other))
    assert differs == tf.as_dtype(dtype).is_floating
