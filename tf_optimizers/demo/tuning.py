"""How a part chooses a learning rate."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trial:
    """One learning rate of a cell's grid and what its networks reached."""

    learning_rate: float
    validation_accuracy: tuple[float, ...]


def choose_trial(trials: list[Trial]) -> Trial:
    """Return the best mean on validation; of equals, the lowest rate."""
    return max(
        trials,
        key=lambda trial: (
            np.mean(trial.validation_accuracy),
            -trial.learning_rate,
        ),
    )
