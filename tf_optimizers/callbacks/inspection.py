"""What all workers find out about a state before it is kept or let go."""

import numpy as np

from tf_optimizers.callbacks.state import State
from tf_optimizers.distribute.digests import digests
from tf_optimizers.distribute.workers import Workers


class Inspection:
    """Looks at the values of a state, and comes to the same on all workers.

    Args:
        state: Whose values they are.
        workers: Each calls the same methods in the same order.
    """

    def __init__(self, state: State, workers: Workers) -> None:
        self._state = state
        self._workers = workers

    def alike(self, values: dict[str, list[np.ndarray]]) -> set[str]:
        """Return the names of what has one value on all replicas."""
        if self._workers.replicas == 1:
            return set(values)
        mine = {name: digests(parts) for name, parts in values.items()}
        everyone = self._workers.gather(mine)
        return {
            name
            for name in values
            if len(set().union(*(each[name] for each in everyone))) == 1
        }

    def not_finite(self, values: dict[str, list[np.ndarray]]) -> str | None:
        """Return the path of the first variable that is not on any worker."""
        found = self._workers.gather(self._state.first_not_finite(values))
        first = min((i for i in found if i is not None), default=None)
        if first is None:
            return None
        return self._state.sections["lasting"][first].path

    def check_finite(self, values: dict[str, list[np.ndarray]]) -> None:
        """Refuse to keep what nobody wants back."""
        path = self.not_finite(values)
        if path is not None:
            raise RuntimeError(
                "A variable must be finite to be backed up. Received NaN or "
                f"inf in {path}. The backup before is kept: start again from "
                "it with a lower learning rate or `clipnorm`, and check the "
                "data."
            )

    def check_weights(self, alike: set[str]) -> None:
        """Raise if replicas have parted."""
        for i, variable in enumerate(self._state.sections["lasting"]):
            if variable.trainable and f"lasting.{i}" not in alike:
                raise RuntimeError(
                    "A weight must be the same on all replicas. Received "
                    f"different values of {variable.path}. Do not assign to "
                    "weights on one worker alone, and start again from the "
                    "last backup."
                )
