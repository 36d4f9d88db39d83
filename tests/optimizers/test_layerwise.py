"""The pure functions of Lamb and LANS, without an optimizer."""

import math

import cases
import numpy as np
import pytest
import reference
import tensorflow as tf
from real_workers import PACKAGE, output_of

import tf_optimizers as tfo
from tf_optimizers.kernels import betas, bias_correction
from tf_optimizers.lans import normalized
from tf_optimizers.layerwise.layerwise_step import (
    LayerwiseHyperparameters,
    trust_ratio,
)

HYPERPARAMETERS = LayerwiseHyperparameters(betas(0.9, 0.999), 1e-6, 0.05)


@pytest.mark.parametrize("step", [1, 10, 100_000])
@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999])
def test_bias_correction_keeps_all_digits(beta, step):
    exact = 1 - beta**step
    log = betas(beta, beta).log_of_m
    single = bias_correction(log, tf.constant(step, "float32"))
    double = bias_correction(log, tf.constant(step, "float64"))
    assert float(single) == pytest.approx(exact, rel=3e-7)
    assert float(double) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("scale", [4e37, 1e38])
def test_lans_follows_a_gradient_that_float32_has_no_norm_for(scale):
    """In float32, its norm is inf, or the inverse of its norm is 0."""
    steps = []
    for factor in (1, np.float32(scale)):
        variables = cases.make_variables()
        gradients = [factor * g for g in cases.make_gradients(0)]
        tfo.LANS(0.1).apply(gradients, variables)
        steps.append(variables)
    assert cases.error(*steps) < 1e-6


@pytest.mark.parametrize("norm", [0.0, 1e-39])
def test_normalize_of_no_gradient_is_zero(norm):
    result = normalized(tf.constant(norm))(tf.zeros([3]))
    np.testing.assert_array_equal(result, np.zeros(3))


@pytest.mark.parametrize(
    ("weight", "direction", "lower", "upper", "expected"),
    [
        (6.0, 2.0, None, None, 3.0),
        (0.0, 2.0, None, None, 1.0),
        (6.0, 0.0, None, None, 1.0),
        (0.0, 2.0, 0.5, None, 0.25),
        (6.0, 2.0, None, 4.0, 2.0),
        (6.0, 2.0, 1.0, 8.0, 3.0),
        (math.nan, 2.0, None, None, math.nan),
        (6.0, math.nan, None, None, math.nan),
        (0.0, math.nan, 0.5, None, math.nan),
    ],
)
def test_trust_ratio(weight, direction, lower, upper, expected):
    bounds = HYPERPARAMETERS._replace(lower_bound=lower, upper_bound=upper)
    ratio = trust_ratio(
        bounds,
        tf.constant(weight, "float64"),
        tf.constant(direction, "float64"),
    )
    assert float(ratio) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("optimizer", [tfo.Lamb, tfo.LANS])
@pytest.mark.parametrize(
    ("lower", "upper"), [(50.0, None), (None, 0.1), (2.0, 3.0)]
)
def test_bounds_match_reference(optimizer, lower, upper):
    bounds = {"lower_bound": lower, "upper_bound": upper}
    step = reference.lans if optimizer is tfo.LANS else reference.lamb
    with cases.without_kernels():
        actual = cases.run(
            optimizer(0.02, weight_decay=0.05, **bounds),
            cases.make_variables(),
            4,
        )

    def expected(*args):
        return step(*args, weight_decay=0.05, **bounds)

    assert cases.error(actual, cases.run_reference(expected, 4)) < 1e-6


TEMPORARY_MEMORY = """
import sys
sys.path.insert(0, "benchmarks")
import memory, keras, tensorflow as tf
import tf_optimizers as tfo
variable = keras.Variable(tf.ones([4096, 4096]))  # 64 MiB
gradient = tf.ones([4096, 4096])
for optimizer in (tfo.Lamb(), tfo.LANS(weight_decay=0.01)):
    optimizer.build([variable])
    step = tf.function(lambda: optimizer.apply([gradient], [variable]))
    step()
    print(memory.temporary_bytes(step))
"""


@pytest.mark.long
def test_step_keeps_nothing_of_the_size_of_the_variable():
    output = output_of(TEMPORARY_MEMORY, cwd=PACKAGE)
    sizes = list(map(int, output.split()))
    assert len(sizes) == 2
    assert max(sizes) < 2**24


# Similar formulas, each of which must differ by far more than the tolerance.


def adam(w, g, state, lr):
    return reference.lamb(w, g, state, lr, weight_decay=0.05, adapt=False)


def lamb_decayed_outside_the_ratio(w, g, state, lr):
    decayed = w - lr * 0.05 * w
    return reference.lamb(decayed, g, state, lr, weight_decay=0.0)


def lamb_without_bias_correction(w, g, state, lr):
    return reference.lamb(w, g, {"t": 10**6} | state, lr, weight_decay=0.05)


def lamb_of_normalized_gradients(w, g, state, lr):
    g = g / np.linalg.norm(g)
    return reference.lamb(w, g, state, lr, weight_decay=0.05)


def lans_with_the_moved_weight(w, g, state, lr):
    """MXNet's unfused step: the second half decays the moved weights."""
    g = g / np.linalg.norm(g)
    m_hat, v_hat = reference.moments(state, g, 0.9, 0.999)
    d = np.sqrt(v_hat) + 1e-6
    norm = np.linalg.norm(w)
    a = m_hat / d + 0.05 * w
    w = w - lr * 0.9 * norm / np.linalg.norm(a) * a
    c = g / d + 0.05 * w
    return w - lr * 0.1 * norm / np.linalg.norm(c) * c


def lamb(w, g, state, lr):
    return reference.lamb(w, g, state, lr, weight_decay=0.05)


@pytest.mark.parametrize(
    ("name", "neighbour"),
    [
        ("lamb", adam),
        ("lamb", lamb_decayed_outside_the_ratio),
        ("lamb", lamb_without_bias_correction),
        ("lans", lamb),
        ("lans", lamb_of_normalized_gradients),
        ("lans", lans_with_the_moved_weight),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_neighbour_fails_where_the_optimizer_passes(name, neighbour):
    case = cases.CASES[name]
    actual = cases.run(case.make(0.1), cases.make_variables(), 10)
    right = cases.run_reference(case.reference_step(), 10, 0.1)
    wrong = cases.run_reference(neighbour, 10, 0.1)
    assert cases.error(actual, right) < 2e-6
    assert cases.error(actual, wrong) > 2e-5
