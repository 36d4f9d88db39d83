"""Checks of the arguments of `BackupAndRestore`."""

import os
from typing import Any

from tf_optimizers.checks import check_integer


def check_folder(path: Any) -> str:
    """Return the path of a folder as text."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"`backup_dir` must be a path. Received: backup_dir={path!r}."
        )
    text = os.fspath(path)
    if not text or "://" in str(text):
        raise ValueError(
            "`backup_dir` must be a folder on a local or mounted file system. "
            f"Received: backup_dir={path!r}. Mount the storage to use it."
        )
    return str(text)


def check_frequency(value: Any) -> str | int:
    """Return a number of batches, or "epoch"."""
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
    """Return the name of a run, or None."""
    message = (
        f"`name` must be a non-empty string or None. Received: name={value!r}."
    )
    if value is not None and not isinstance(value, str):
        raise TypeError(message)
    if value == "":
        raise ValueError(message)
    return value
