"""Checks of a state before it is backed up, or its backups are deleted.

Each worker calls the same functions in the same order, and all get the same
result.
"""

from tf_optimizers.callbacks.state import State, Values
from tf_optimizers.distribute.digests import digests
from tf_optimizers.distribute.workers import Workers


def find_alike(values: Values, workers: Workers) -> set[str]:
    """Return the names of what is equal on all replicas."""
    if workers.replicas == 1:
        return set(values)
    mine = {name: digests(parts) for name, parts in values.items()}
    everyone = workers.gather(mine)
    return {
        name
        for name in values
        if len(set().union(*(each[name] for each in everyone))) == 1
    }


def find_not_finite(
    state: State, values: Values, workers: Workers
) -> str | None:
    """Return the path of the first variable with NaN or inf on any worker."""
    found = workers.gather(state.first_not_finite(values))
    first = min((i for i in found if i is not None), default=None)
    return None if first is None else state.sections["lasting"][first].path


def check_finite(state: State, values: Values, workers: Workers) -> None:
    """Refuse to back up a run that has diverged."""
    path = find_not_finite(state, values, workers)
    if path is not None:
        raise RuntimeError(
            "A variable must be finite to be backed up. Received NaN or inf "
            f"in {path}. The previous backup is kept: start again from it with "
            "a lower learning rate or with `clipnorm`, and check the data."
        )


def check_weights(state: State, alike: set[str]) -> None:
    """Raise if weights differ between replicas that have them in common."""
    if not state.has_common_weights:
        return
    for i, variable in enumerate(state.sections["lasting"]):
        if variable.trainable and f"lasting.{i}" not in alike:
            raise RuntimeError(
                "A weight must be the same on all replicas. Received "
                f"different values of {variable.path}. Do not assign to "
                "weights on one worker alone, and start again from the last "
                "backup."
            )
