"""How a part chooses a learning rate."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def tune(
    rates: Sequence[float],
    seeds: Sequence[int],
    validate: Callable[[float, int], float],
) -> dict[str, Any]:
    """Return the rate of the best mean on validation, and all trials.

    Args:
        rates: The grid, from the lowest on; of equals, that is chosen.
        seeds: A network each, for every rate.
        validate: Takes a rate and a seed, returns a validation accuracy.
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
