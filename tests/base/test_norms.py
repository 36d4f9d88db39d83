"""Norms outside of float32's range of squares, and of many elements."""

import numpy as np
import pytest
import tensorflow as tf

from tf_optimizers.kernels import norm, norms


@pytest.mark.parametrize(
    "shape", [(), (1,), (3,), (4095,), (4096,), (4097,), (2**20 - 1, 3)]
)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norm_matches_numpy(shape, scale):
    values = np.random.default_rng(0).standard_normal(shape) * scale
    values = values.astype("float32")
    expected = np.linalg.norm(values.astype("float64"))
    assert float(norm(tf.constant(values))) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("length", [100, 5000, 2**21 + 1000])
def test_norms_of_two_vectors_in_blocks_equal_those_of_whole_vectors(
    length, gpu
):
    """Each vector is computed from several tensors."""
    a, b = np.random.default_rng(0).standard_normal((2, length))

    def vectors(a, b):
        return [a * b, tf.sqrt(tf.abs(a)) - b]

    in_blocks = tf.function(
        lambda *ab: norms(vectors, *ab, gpu=gpu), jit_compile=True
    )
    expected = [np.linalg.norm(vector) for vector in vectors(a, b)]
    np.testing.assert_allclose(in_blocks(a, b), expected, rtol=1e-13)


def test_norm_of_odd_matrix_counts_every_element_once():
    values = np.zeros((131, 101), "float32")
    for row in range(131):
        values[:] = 0
        values[row, row % 101] = row + 1
        assert float(norm(tf.constant(values))) == row + 1


def test_norm_of_nothing_is_zero():
    assert float(norm(tf.zeros([0, 5]))) == 0


def test_norm_of_many_equal_elements_is_exact():
    """A sequential float32 sum would be off by more than 1e-4."""
    values = np.full(20_000_000, 3.1, "float32")
    exact = float(values[0]) * np.sqrt(values.size)
    assert float(norm(tf.constant(values))) == pytest.approx(exact, rel=1e-7)
    naive = np.cumsum(values * values)[-1]
    assert abs(naive / exact**2 - 1) > 1e-4


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_norm_is_not_finite_if_an_element_is_not(value):
    values = np.ones(5000, "float32")
    values[4999] = value
    result = float(norm(tf.constant(values)))
    np.testing.assert_equal(result, value)
