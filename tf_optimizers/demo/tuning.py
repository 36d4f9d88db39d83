"""Chooses a learning rate from a grid."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def tune(
    rates: Sequence[float],
    seeds: Sequence[int],
    validate: Callable[[float, int], float],
) -> dict[str, Any]:
    """Return the rate with the best mean validation accuracy, and all trials.

    Args:
        rates: The grid, in ascending order. If several rates are equally good,
            the lowest is chosen.
        seeds: At each rate, one network is trained per seed.
        validate: Takes a rate and a seed, and returns a validation accuracy.
    """
    reached = {rate: [validate(rate, seed) for seed in seeds] for rate in rates}
    best = max(rates, key=lambda rate: float(np.mean(reached[rate])))
    return {
        "learning_rate": best,
        "at_edge_of_grid": best in (rates[0], rates[-1]),
        "tuning": [
            {"learning_rate": rate, "validation_accuracy": accuracies}
            for rate, accuracies in reached.items()
        ],
    }
