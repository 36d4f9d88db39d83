"""Comparisons of a training on several replicas with one in a process."""

import cases
import numpy as np

# For float32 sums in another order, over steps of more than 1e-2.
TOLERANCE = 2e-6


def run_twice(strategy, run):
    """Return the results of a function without a strategy, and under one."""
    expected = run()
    with strategy.scope():
        return expected, run()


def assert_trains_alike(strategy, train):
    """Compare weights and logs; return the model of one process.

    Args:
        strategy: The strategy with several replicas.
        train: Returns a model and a list of logs.
    """
    (expected, logs), (model, found) = run_twice(strategy, train)
    pairs = model.trainable_weights, expected.trainable_weights
    assert cases.error(*pairs) < TOLERANCE
    # A frozen weight, such as a bias, may be 0.
    pairs = model.non_trainable_weights, expected.non_trainable_weights
    for own, other in zip(*pairs, strict=True):
        atol = TOLERANCE * np.abs(other).max()
        np.testing.assert_allclose(own, other, rtol=0, atol=atol)
    assert cases.error(found, logs) < 1e-5
    return expected
