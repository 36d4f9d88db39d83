"""Replicas stay equal, regardless of the order of additions.

A GPU adds values at repeated positions in any order. A replica's results must
not depend on this order, since all replicas receive the same values.
"""

import contextlib

import cases
import numpy as np
import pytest
import real_workers
import tensorflow as tf
from permuted import permuted_additions
from scripts import additions

from tf_optimizers.kernels import sum_rows

# The least change in 6 steps of 1e-2; compression defers a part.
MOVED = 5e-3
HAS_GPU = bool(tf.config.list_physical_devices("GPU"))
on_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


def assert_replicas_agree(found):
    """Check the weights of all replicas and processes, for each training."""
    for name in found[0]:
        first, *others = [
            row for result in found for row in result[name]["replicas"]
        ]
        assert others, name
        assert all(row == first for row in others), name
        assert found[0][name]["moved"] > MOVED, name


IN_ONE = [n + kind for n in additions.OURS for kind in ("", additions.DENSE)]
REPRESENTATIVE = ["lamb", "dgc"]


@pytest.mark.parametrize(
    "name",
    cases.with_long(IN_ONE, [n for n in IN_ONE if n not in REPRESENTATIVE]),
)
def test_replicas_of_one_process_agree(mirrored, name):
    with permuted_additions():
        first, second = additions.fit(mirrored, name)
    np.testing.assert_array_equal(first, second)
    assert additions.moved(first, name) > MOVED


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_workers_agree(tmp_path, devices):
    found = real_workers.results(
        *("additions", tmp_path, 2, "workers", "permuted", *additions.EVERY),
        devices=devices,
    )
    assert list(found[0]) == additions.EVERY
    assert_replicas_agree(found)


ON_GPU = [f"dgc{additions.DENSE}", f"loco of 4 steps{additions.DENSE}"]


@on_gpu
@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize(
    ("where", "workers", "names"),
    [
        ("workers", 2, [*additions.MAKE, *ON_GPU]),
        ("devices", 1, [*additions.OURS, *ON_GPU]),
    ],
    ids=["workers", "devices"],
)
def test_replicas_on_a_gpu_agree(tmp_path, where, workers, names, part):
    names = names[part::3]
    found = real_workers.results(
        "additions", tmp_path, workers, where, "plain", *names
    )
    assert_replicas_agree(found)


def test_permuted_additions_differ():
    """Check the patch; without it, the tests above would prove nothing."""
    values = tf.random.stateless_normal([1000, 1], [1, 2])
    rows = tf.zeros([1000], tf.int32)
    with permuted_additions():
        sums = {
            tf.math.unsorted_segment_sum(values, rows, 1).numpy().item()
            for _ in range(20)
        }
    assert len(sums) > 1


@pytest.mark.parametrize("order", [contextlib.nullcontext, permuted_additions])
@pytest.mark.parametrize("xla", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_are_summed(dtype, xla, order):
    rng = np.random.default_rng(0)
    values = rng.standard_normal([40, 2, 3]).astype(dtype)
    rows = rng.integers(0, 7, 40)
    expected = np.zeros([8, 2, 3], dtype)
    np.add.at(expected, rows, values)
    with order():
        sums = tf.function(sum_rows, jit_compile=xla)(
            tf.constant(values), tf.constant(rows), 8
        )
    np.testing.assert_allclose(sums, expected, rtol=1e-6, atol=1e-6)


def test_no_rows_sum_to_zeros():
    sums = sum_rows(tf.zeros([0, 3]), tf.zeros([0], tf.int64), 4)
    np.testing.assert_array_equal(sums, np.zeros([4, 3]))


@on_gpu
def test_rows_are_summed_in_one_order_on_a_gpu():
    values = tf.random.stateless_normal([100_000, 8], [1, 2])
    rows = tf.random.stateless_uniform([100_000], [3, 4], 0, 10, tf.int32)
    with tf.device("/GPU:0"):
        sums = [sum_rows(values, rows, 10).numpy() for _ in range(20)]
        assert all(np.array_equal(sums[0], other) for other in sums[1:])
    np.testing.assert_allclose(
        sums[0], cases.as_numpy(sum_rows(values, rows, 10)), rtol=1e-4
    )
