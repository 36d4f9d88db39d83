"""Checks the arguments of `BackupAndRestore`, and the state of a run.

Functions with an argument `group` exchange messages between workers. All
workers must call them in the same order, and get the same results.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tf_optimizers.callbacks.backup.files import Folder
from tf_optimizers.callbacks.backup.state import State, Values
from tf_optimizers.checks import check_integer
from tf_optimizers.codes.digests import digests
from tf_optimizers.replicas import ReplicaGroup


def check_folder(path: Any) -> str:
    """Check `backup_dir`; return its absolute path as a string.

    A relative path would become wrong if the script called `os.chdir`.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"`backup_dir` must be a path. Received: backup_dir={path!r}. Pass "
            "a string or a `pathlib.Path`."
        )
    text = os.fsdecode(path)
    if not text or "://" in text:
        raise ValueError(
            "`backup_dir` must be a folder on a local or mounted file system. "
            f"Received: backup_dir={path!r}. Pass the path of a folder. Mount "
            "the storage first if it is remote."
        )
    return str(Path(text).absolute())


def check_frequency(value: Any) -> str | int:
    """Check `save_freq`; return "epoch" or a number of batches."""
    if value == "epoch":
        return value
    try:
        return check_integer("save_freq", value, 1)
    except TypeError:
        raise TypeError(
            '`save_freq` must be "epoch" or an integer >= 1. '
            f"Received: save_freq={value!r}."
        ) from None


def check_name(value: Any) -> str | None:
    """Check `name`; return the name of a run, or None."""
    message = (
        f"`name` must be a non-empty string or None. Received: name={value!r}."
    )
    if value is not None and not isinstance(value, str):
        raise TypeError(message)
    if value == "":
        raise ValueError(message)
    return value


def gather(group: ReplicaGroup, statement: Any) -> list[Any]:
    """Return every worker's `statement`, a JSON value."""
    hint = "Pass `BackupAndRestore` to `fit` on every worker."
    return group.agree("a backup", statement, hint)


def find_identical(values: Values, group: ReplicaGroup) -> set[str]:
    """Return the names of values that are equal on all replicas."""
    if group.count == 1:
        return set(values)
    mine = {name: digests(copies) for name, copies in values.items()}
    everyone = gather(group, mine)
    return {
        name
        for name in values
        if len(set().union(*(each[name] for each in everyone))) == 1
    }


def find_not_finite(
    state: State, values: Values, group: ReplicaGroup
) -> str | None:
    """Return the path of the first variable that is not finite, or None.

    `State.first_not_finite` checks the variables on each worker.
    """
    found = gather(group, state.first_not_finite(values))
    first = min((i for i in found if i is not None), default=None)
    return None if first is None else state.sections["lasting"][first].path


def check_finite(state: State, values: Values, group: ReplicaGroup) -> None:
    """Raise if `find_not_finite` finds a variable."""
    path = find_not_finite(state, values, group)
    if path is not None:
        raise RuntimeError(
            "A variable must be finite to be backed up. Received: NaN or inf "
            f"in {path}. Check the data, and start the script again with a "
            "lower learning rate or with `clipnorm`. `fit` then resumes from "
            "the previous backup, if there is one."
        )


def check_weights(state: State, identical: set[str]) -> None:
    """Raise if weights differ between replicas although they must be equal."""
    if not state.has_common_weights:
        return
    for i, variable in enumerate(state.sections["lasting"]):
        if variable.trainable and f"lasting.{i}" not in identical:
            raise RuntimeError(
                "A weight must be the same on all replicas. Received: "
                f"different values of {variable.path}. If the script assigns "
                "values to weights, assign the same values on all workers. "
                "Then start the script again."
            )


def warnings_of_lengths(
    content: dict[str, Any], epochs: float, steps: int | None
) -> Iterator[str]:
    """Yield warnings if no epoch is left, or if an epoch's length has changed.

    The length matters only if the backup was made in the middle of an epoch.

    Args:
        content: The description of the backup.
        epochs: The `epochs` of `fit`, or inf in a custom training loop.
        steps: The number of batches in an epoch, or None if unknown.
    """
    if content["epoch"] >= epochs:
        yield (
            "`epochs` must be greater than the number of epochs before the "
            f"backup. Received: epochs={epochs}, and a backup after epoch "
            f"{content['epoch']}. To train longer, raise `epochs`; for another "
            "run, pass another `name` or `backup_dir`."
        )
    before = content.get("steps")
    if content["batch"] and before and steps and before != steps:
        yield (
            "An epoch that is resumed partway must have the same number of "
            f"batches as before. Received: {steps} batches, and {before} "
            f"when the backup was made. `fit` still skips the first "
            f"{content['batch']} batches. If the batch size has changed, some "
            "rows are missed or repeated: pass the previous batch size, or "
            'back up with `save_freq="epoch"`.'
        )


def warnings_of_others(folder: Folder, name: str | None) -> Iterator[str]:
    """Yield a warning if `name` is None and other runs have backups."""
    others = folder.others()
    if others and name is None:
        yield (
            "`fit` restores only backups of the same name. Received: "
            f"backup_dir={str(folder.path)!r}, with backups of {others}, while "
            f"this `fit` is named {folder.name!r}. This `fit` starts from the "
            "beginning, and keeps these backups. To resume from one of them, "
            f"pass `name={others[-1]!r}`."
        )
