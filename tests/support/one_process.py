"""Comparisons of a training on several replicas with one in a process."""

import cases

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
    assert cases.error(model.weights, expected.weights) < TOLERANCE
    assert cases.error(found, logs) < 1e-5
    return expected
