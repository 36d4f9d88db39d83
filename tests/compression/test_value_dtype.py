"""Values of half precision: fewer bytes, and nothing lost to rounding."""

import dgc
import numpy as np
import pytest
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.compression.choice import choose_exchange
from tf_optimizers.compression.wire import Wire, rounded

HALF = ["float16", "bfloat16"]
SHAPES = [(6, 8), (7,)]


@pytest.mark.parametrize("dtype", HALF)
def test_what_is_sent_and_what_is_missing_make_the_value(dtype):
    rng = np.random.default_rng(0)
    values = rng.standard_normal(10_000) * 10.0 ** rng.integers(-9, 8, 10_000)
    values = np.append(values, [3.4e38, -3.4e38, 65504, 65520]).astype(
        "float32"
    )
    sent, missing = rounded(tf.constant(values), tf.as_dtype(dtype))
    sent, missing = (tf.cast(x, "float64").numpy() for x in (sent, missing))
    assert np.isfinite(sent).all() and np.isfinite(missing).all()
    assert np.count_nonzero(missing) > 5000
    inside = np.abs(values) < 6e4
    np.testing.assert_array_equal((sent + missing)[inside], values[inside])
    np.testing.assert_allclose(sent + missing, values, rtol=1e-7)


@pytest.mark.parametrize("dtype", HALF)
def test_of_what_is_not_finite_nothing_is_missing(dtype):
    values = tf.constant([np.nan, np.inf, -np.inf])
    sent, missing = rounded(values, tf.as_dtype(dtype))
    np.testing.assert_array_equal(tf.cast(sent, "float32"), values)
    np.testing.assert_array_equal(missing, np.zeros(3))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("masking", [True, False])
def test_nothing_is_lost(mirrored, dtype, masking):
    """Rounding alone, were it not fed back, would lose ten times as much."""
    run = dgc.Run(
        mirrored,
        {str(i): np.zeros(shape) for i, shape in enumerate(SHAPES)},
        1.0,
        sparsity=(0.9,),
        momentum_masking=masking,
        value_dtype=dtype,
    )
    accumulated = [np.zeros(shape) for shape in SHAPES]
    for step in range(200):
        momentum = run.memory("momentum")
        gradients = dgc.make_gradients(step, SHAPES, 2)
        run.step(gradients)
        for i, total in enumerate(accumulated):
            for replica in range(2):
                u = momentum[i][replica].astype("float64")
                total += 0.9 * u + gradients[replica][i]
    for sent, residual, total in zip(
        run.weights(), run.memory("residual"), accumulated, strict=True
    ):
        kept_back = sum(r.astype("float64") for r in residual)
        np.testing.assert_allclose(kept_back - sent, total, atol=2e-4)


def single(mirrored, gradient, dtype, **kwargs):
    """Return a run after a step in which only the first replica learns."""
    run = dgc.Run(
        mirrored,
        {"w": np.zeros(len(gradient))},
        1.0,
        sparsity=(0.5,),
        value_dtype=dtype,
        **kwargs,
    )
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


def test_what_rounds_to_zero_is_not_sent(mirrored):
    """Nor is its momentum masked."""
    gradient = np.array([1e-9, 0, 1, 0], "float32")
    run = single(mirrored, gradient, "float16")
    np.testing.assert_array_equal(run.weights()[0], [0, 0, -1, 0])
    for name in ("momentum", "residual"):
        np.testing.assert_array_equal(
            run.memory(name)[0][0], gradient * [1, 0, 0, 0]
        )
    run = single(mirrored, gradient, "bfloat16")
    assert run.weights()[0][0] == pytest.approx(-1e-9, rel=1e-2)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_is_seen_in_the_weights_and_sent_once(
    mirrored, dtype, value
):
    run = single(mirrored, [1, value, 0, 0], dtype)
    np.testing.assert_array_equal(run.weights()[0], [-1, -value, 0, 0])
    np.testing.assert_array_equal(run.memory("residual")[0][0], np.zeros(4))


def test_sums_over_replicas_are_in_float32(mirrored):
    run = dgc.Run(mirrored, {"w": np.zeros(1)}, 1.0, value_dtype="float16")
    run.step([[np.array([2048], "float32")], [np.array([1], "float32")]])
    assert run.weights()[0] == [-2049]  # Is not a float16.


@pytest.mark.parametrize(
    ("dtype", "packed", "plain"),
    [("float32", 6, 8), ("float16", 4, 6), ("bfloat16", 4, 8)],
)
def test_summary_counts_the_bytes_of_the_transport(
    mirrored, dtype, packed, plain
):
    """TensorFlow has no 2-byte positions, and cannot gather bfloat16."""
    wires = {
        is_packed: Wire(2, tf.as_dtype(dtype), is_packed)
        for is_packed in (True, False)
    }
    for is_packed, expected in (
        (True, packed * 1000 + 4 * 16),
        (False, plain * 1000),
    ):
        exchange = choose_exchange(wires[is_packed], [10**6], [1000])
        assert exchange.sent_bytes() == [expected]
    run = dgc.Run(
        mirrored, {"w": np.zeros((40, 50))}, sparsity=(0.9,), value_dtype=dtype
    )
    summary = run.optimizer.communication_summary()
    assert summary["total"]["sent_bytes"] == plain * 200


def test_value_dtype_survives_in_the_config():
    optimizer = tfo.DGCMomentum(0.1, value_dtype="bfloat16")
    copy = tfo.DGCMomentum.from_config(optimizer.get_config())
    assert copy.value_dtype == "bfloat16"
