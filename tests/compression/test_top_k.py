"""The selection is exact for all values and starts of sampling."""

import numpy as np
import pytest
import tensorflow as tf

from tf_optimizers.compression import top_k as module
from tf_optimizers.compression.top_k import top_k

GRAPH = tf.function(top_k)


@tf.function(jit_compile=True, autograph=False)
def as_on_a_gpu(values, k, seed):
    return top_k(values, k, seed, gpu=True)


KINDS = [
    "normal",
    "ties",
    "equal",
    "mostly zero",
    "zero",
    "not finite",
    "all nan",
    "rising",
    "neighbours",
    "tiny",
]


def select(values, k, seed=(0, 0), function=GRAPH):
    positions = function(tf.constant(values), k, tf.constant(seed)).numpy()
    found = positions[positions >= 0]
    np.testing.assert_array_equal(positions[: k - len(found)], -1)
    return found


def expected(values, k):
    """Select by NumPy: a stable sort, NaN first, without zeros."""
    magnitude = np.abs(values).astype("float64")
    magnitude[np.isnan(values)] = np.inf
    magnitude[np.isinf(values)] = np.finfo("float64").max
    order = np.argsort(-magnitude, kind="stable")[:k]
    return np.sort(order[magnitude[order] > 0])


def make(kind, size):
    rng = np.random.default_rng(0)
    values = rng.standard_normal(size).astype("float32")
    if kind == "ties":
        values = np.sign(values) * rng.integers(1, 4, size)
    if kind == "equal":
        values = np.sign(values)
    if kind == "mostly zero":
        values[rng.random(size) < 0.9995] = 0
    if kind == "zero":
        values[:] = 0
    if kind == "not finite":
        values[::7] = np.resize([np.inf, np.nan, -np.inf], len(values[::7]))
    if kind == "all nan":
        values[:] = np.nan
    if kind == "rising":
        values = np.arange(size)
    if kind == "neighbours":
        # These differ in the last bits.
        values = (2**30 + rng.integers(0, 50, size, "int32")).view("float32")
    if kind == "tiny":
        # Denormal numbers, which this machine's arithmetic treats as zero.
        values = values * 1e-40
    return values.astype("float32")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "k"),
    [
        (1, 1),
        (48, 12),
        (1000, 1),
        (1000, 1000),
        (5003, 200),
        (40_000, 40),
        (300_003, 300),
        (300_003, 2000),
        (10**5, 25000),
    ],
)
def test_selection_is_exact(kind, size, k):
    values = make(kind, size)
    np.testing.assert_array_equal(select(values, k), expected(values, k))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "k"), [(48, 12), (1000, 1000), (5003, 40)])
def test_selection_on_a_gpu_is_exact(kind, size, k):
    values = make(kind, size)
    found = select(values, k, function=as_on_a_gpu)
    np.testing.assert_array_equal(found, expected(values, k))


@pytest.mark.parametrize("function", [GRAPH, as_on_a_gpu])
def test_larger_entry_is_not_pushed_out_by_ties(function):
    values = np.array([1, 1, 2], "float32")
    found = select(values, 2, function=function)
    np.testing.assert_array_equal(found, [0, 2])


def test_misleading_samples_were_among_them():
    """Some thresholds for such values are too high, so the fallback is used."""
    size, k = 300_000, 3000
    stride = module._stride(size, k)
    values = make("normal", size)
    values[7::stride] += 100
    values[7 + stride * 2000 :: stride] -= 100
    counts = []
    for seed in range(40):
        threshold = module._threshold(
            tf.constant(values), k, tf.constant([seed, 1])
        )
        reaches = module._reaches(tf.constant(values), threshold)
        counts.append(int(tf.math.count_nonzero(reaches)))
        np.testing.assert_array_equal(
            select(values, k, (seed, 1)), expected(values, k)
        )
    assert min(counts) < k < max(counts)


@pytest.mark.parametrize("columns", [1600, 1024, 512 * 3])
def test_columns_are_sampled_evenly(columns):
    """Only a few columns are nonzero, as with units that are never active."""
    values = np.zeros((1280, columns), "float32")
    values[:, 3:-1:17] = make("normal", 1280).reshape(-1, 1)
    k, flat = values.size // 64, tf.constant(values.reshape(-1))
    for seed in range(20):
        threshold = module._threshold(flat, k, tf.constant([seed, 0]))
        reaches = module._reaches(flat, threshold)
        assert k <= int(tf.math.count_nonzero(reaches)) < 2 * k


def test_sampling_leaves_few_candidates():
    """Otherwise the exact cut would do the work that sampling should save."""
    values = tf.constant(make("normal", 10**6))
    for seed in range(20):
        threshold = module._threshold(values, 1000, tf.constant([seed, 0]))
        reaches = module._reaches(values, threshold)
        assert 1000 <= int(tf.math.count_nonzero(reaches)) < 2500


def test_positions_of_huge_variables_do_not_overflow():
    """Tracing allocates no memory."""
    size = 2**31 + 32
    graph = GRAPH.get_concrete_function(
        tf.TensorSpec([size]), 200, tf.TensorSpec([2], tf.int32)
    ).graph
    products = [op for op in graph.get_operations() if op.type == "Mul"]
    assert {op.outputs[0].dtype for op in products} == {tf.int64}
