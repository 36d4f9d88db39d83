"""Values with fewer bytes, or few bits: rounding loses nothing."""

import functools

import dgc
import numpy as np
import pytest
import tensorflow as tf
from cases import with_long

from tf_optimizers.codes.layout import Layout
from tf_optimizers.codes.values import CODES
from tf_optimizers.compression.exchanges import choose_exchange
from tf_optimizers.compression.wire import Wire

HALF = ["float16", "bfloat16"]
FEW = ["int4", "int2"]  # Bits.
SHAPES = [(6, 8), (7,)]
each_not_finite = pytest.mark.parametrize(
    "value", with_long([np.nan, -np.inf, np.inf], [np.inf])
)


def rounded(values, dtype):
    """Return received values, as float32."""
    values = tf.constant(values, "float32")[tf.newaxis]
    layout = Layout([tf.ones(values.shape, tf.int32)])
    (sent,) = CODES[dtype].round([values], layout)
    return tf.cast(sent[0], "float32").numpy()


@pytest.mark.parametrize("dtype", HALF)
def test_sent_and_unsent_parts_sum_to_the_value(dtype):
    rng = np.random.default_rng(0)
    values = rng.standard_normal(10_000) * 10.0 ** rng.integers(-9, 8, 10_000)
    values = np.append(values, [3.4e38, -3.4e38, 65504, 65520]).astype(
        "float32"
    )
    sent = rounded(values, dtype)
    missing = values - sent
    assert np.isfinite(sent).all() and np.isfinite(missing).all()
    assert np.count_nonzero(missing) > 5000
    inside = np.abs(values) < 6e4
    np.testing.assert_array_equal((sent + missing)[inside], values[inside])
    np.testing.assert_allclose(sent + missing, values, rtol=1e-7)


ZEROS = {"w": np.zeros(4, "float32")}


@functools.cache
def traced(strategy, dtype, **kwargs):
    settings = {"sparsity": (0.5,), "value_dtype": dtype} | kwargs
    return dgc.Run(strategy, ZEROS, 1.0, **settings)


def single(mirrored, gradient, dtype, **kwargs):
    """Return a run after a step with a gradient on the first replica only."""
    run = traced(mirrored, dtype, **kwargs)
    run.restart(ZEROS, 1.0)
    gradient = np.array(gradient, "float32")
    run.step([[gradient], [np.zeros_like(gradient)]])
    return run


def test_values_beyond_the_range_are_sent_in_parts(mirrored):
    run = single(mirrored, [1e5, 1, -1e5, 0], "float16", momentum=0.0)
    np.testing.assert_array_equal(run.weights()[0], [-65504, 0, 65504, 0])
    rest = 1e5 - 65504
    np.testing.assert_array_equal(
        run.memory("residual")[0][0], [rest, 1, -rest, 0]
    )
    run.step([[np.zeros(4, "float32")]] * 2)
    np.testing.assert_allclose(run.weights()[0], [-1e5, 0, 1e5, 0], atol=8)


def test_values_that_round_to_zero_are_not_sent(mirrored):
    """Its momentum is not masked either."""
    gradient = np.array([1e-9, 0, 1, 0], "float32")
    run = single(mirrored, gradient, "float16")
    np.testing.assert_array_equal(run.weights()[0], [0, 0, -1, 0])
    for name in ("momentum", "residual"):
        np.testing.assert_array_equal(
            run.memory(name)[0][0], gradient * [1, 0, 0, 0]
        )
    run = single(mirrored, gradient, "bfloat16")
    assert run.weights()[0][0] == pytest.approx(-1e-9, rel=1e-2)


def test_values_that_round_to_zero_in_their_chunk_stay(mirrored):
    """It is sent once it is large in its chunk. Two bits can hold both."""
    gradient = np.array([0.07, 0, 1, 0], "float32")
    run = single(mirrored, gradient, "int4", momentum=0.0)
    np.testing.assert_allclose(run.weights()[0], [0, 0, -1, 0], rtol=4e-3)
    run.step([[np.zeros(4, "float32")]] * 2)
    np.testing.assert_allclose(run.weights()[0], -gradient, rtol=4e-3)
    run = single(mirrored, gradient, "int2")
    np.testing.assert_allclose(run.weights()[0], -gradient, rtol=4e-3)


@pytest.mark.parametrize("dtype", FEW)
@pytest.mark.parametrize("value", [2e-38, 3.4e38])
def test_smallest_and_largest_lose_nothing(mirrored, dtype, value):
    """Denormal parts, and parts beyond the range of a scale, stay in v."""
    run = single(mirrored, [value, 0, 0, 0], dtype, momentum=0.0)
    sent = -run.weights()[0][0].astype("float64")
    kept = sum(v[0] for v in run.memory("residual")[0])
    assert np.isfinite(sent) and kept != 0
    assert sent + kept == pytest.approx(value, rel=1e-7)


@pytest.mark.parametrize("dtype", FEW)
def test_values_below_any_scale_are_sent_once_they_grow(mirrored, dtype):
    value, steps = 2.0**-121, 20
    gradient = [value, 0, 0, 0]
    run = single(mirrored, gradient, dtype, momentum=0.0)
    np.testing.assert_array_equal(run.weights()[0], np.zeros(4))
    zeros = np.zeros(4, "float32")
    for _ in range(steps - 1):
        run.step([[np.array(gradient, "float32")], [zeros]])
    sent = -run.weights()[0][0].astype("float64")
    kept = sum(v[0] for v in run.memory("residual")[0])
    assert sent > steps / 2 * value
    assert sent + kept == pytest.approx(steps * value, rel=1e-6)


@pytest.mark.parametrize("dtype", FEW)
@each_not_finite
def test_other_values_of_a_chunk_that_is_not_finite_stay(
    mirrored, dtype, value
):
    run = single(mirrored, [1, value, 0, 0], dtype, momentum=0.0)
    np.testing.assert_array_equal(run.weights()[0], [0, -value, 0, 0])
    np.testing.assert_array_equal(run.memory("residual")[0][0], [1, 0, 0, 0])
    run.step([[np.zeros(4, "float32")]] * 2)
    assert run.weights()[0][0] == pytest.approx(-1, rel=4e-3)


@pytest.mark.parametrize("dtype", HALF)
@each_not_finite
def test_not_finite_is_seen_in_the_weights_and_sent_once(
    mirrored, dtype, value
):
    run = single(mirrored, [1, value, 0, 0], dtype)
    np.testing.assert_array_equal(run.weights()[0], [-1, -value, 0, 0])
    np.testing.assert_array_equal(run.memory("residual")[0][0], np.zeros(4))


def test_sums_over_replicas_are_in_float32(mirrored):
    run = dgc.Run(mirrored, {"w": np.zeros(1)}, 1.0, value_dtype="float16")
    run.step([[np.array([2048], "float32")], [np.array([1], "float32")]])
    assert run.weights()[0] == [-2049]  # Not a float16 number.


@pytest.mark.parametrize("dtype", with_long(CODES, set(CODES) - {"bfloat16"}))
def test_nothing_is_lost_next_to_variables_of_other_scales(mirrored, dtype):
    """Exchanges are dense or gathered, and complete at the end."""
    steps = dgc.balances_of_scales(mirrored, value_dtype=dtype, **dgc.STAGES)
    dgc.assert_all_scales_are_conserved([steps], dtype)


@pytest.mark.parametrize(
    ("dtype", "packed", "plain"),
    [
        ("float32", 5496, 8),
        ("float16", 3496, 6),
        ("bfloat16", 3496, 8),
        ("int4", 2028, 8),
        ("int2", 1812, 8),
    ],
)
def test_summary_counts_the_bytes_of_the_transport(
    mirrored, dtype, packed, plain
):
    """TensorFlow has no codes, and cannot gather bfloat16.

    A position takes 9 low bits; 1954 bits encode all blocks of 512.
    """
    for is_packed, expected in ((True, packed), (False, plain * 1000)):
        wire = Wire(2, dtype, is_packed)
        exchange = choose_exchange(wire, [10**6], [1000])
        assert exchange.sent_bytes() == [expected]
    run = dgc.Run(
        mirrored, {"w": np.zeros((40, 50))}, sparsity=(0.9,), value_dtype=dtype
    )
    summary = run.optimizer.communication_summary()
    assert summary["total"]["sent_bytes"] == plain * 200
