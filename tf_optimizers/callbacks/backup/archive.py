"""Writes and reads backups, on all workers together.

Worker 0 writes the values that are equal on all replicas. Every worker writes
the other values of its replicas. Once all files are written, worker 0 commits
the backup.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from tf_optimizers._compat.keras_internals import global_seed, set_global_seed
from tf_optimizers.callbacks.backup.backup_checks import (
    check_finite,
    check_weights,
    find_identical,
    find_not_finite,
    gather,
)
from tf_optimizers.callbacks.backup.files import DamagedError, Folder
from tf_optimizers.callbacks.backup.resuming import BackupReader
from tf_optimizers.callbacks.backup.state import State, Values, redistribute
from tf_optimizers.replicas import ReplicaGroup

_FILE_ERRORS = (OSError, DamagedError)


class Archive:
    """Saves and restores the backups of one run.

    Each save deletes old backups, so that at most `backups` are left.
    All workers must call the same methods in the same order. If the folder may
    have backups of this run, call `newest` before `save`.

    Attributes:
        replaced: The numbers of the damaged backups that `newest` skipped to
            find an intact one.
    """

    def __init__(
        self, folder: Folder, state: State, group: ReplicaGroup, backups: int
    ) -> None:
        self._folder = folder
        self._state = state
        self._backups = backups
        # The numbers of backups that are known to be intact, newest first.
        self._whole: list[int] = []
        self.replaced: list[int] = []
        # The numbers of backups that `newest` found, or `save` wrote.
        self._known: set[int] = set()
        self._group = group
        self._local_replicas = group.count // group.workers

    def check_shared(self) -> None:
        """Raise unless all workers can write to one shared folder."""
        folder = self._folder
        try:
            marks = self._together(folder.leave_mark)
            seen = self._together(lambda: all(map(folder.sees, marks)))
        finally:
            folder.remove_mark()
        if not all(seen):
            raise RuntimeError(
                "`backup_dir` must be a folder that all workers share. "
                f"Received: backup_dir={str(folder.path)!r}, where worker "
                f"{seen.index(False)} does not find all workers' files. Pass "
                "the same path on every worker, on a file system that is "
                "mounted on all machines."
            )

    def save(self, position: dict[str, Any]) -> None:
        """Write a backup, then delete the backups that it replaces.

        Args:
            position: The epoch, the batch, the number of batches in an epoch
                (None if unknown), and the script's learning rates (`Rates`).
        """
        values = self._state.values()
        check_finite(self._state, values, self._group)
        identical = find_identical(values, self._group)
        check_weights(self._state, identical)
        received = self._together(
            lambda: [
                self._folder.next_generation(),
                not self._known.issuperset(self._folder.generations()),
                global_seed(),
            ]
        )
        generation, has_other_writer, _ = received[0]
        if has_other_writer:
            raise RuntimeError(
                "`backup_dir` must belong to one run at a time. Received: "
                f"backup_dir={str(self._folder.path)!r}, where another process "
                "has made a backup of this run since `fit` began. Stop the "
                "other process, or give each run its own folder."
            )
        digests = self._together(
            lambda: self._folder.write_file(
                generation, self._group.worker, self._own(values, identical)
            )
        )
        content = {
            **position,
            "replicas": self._group.count,
            "alike": sorted(identical),
            "parts": digests,
            "seeds": [seed for *_, seed in received],
            "sparse_gradients": self._state.sparse_gradients,
            **self._state.describe(),
        }
        kept = [generation, *self._whole][: self._backups]
        self._together(lambda: self._commit(generation, content, kept))
        self._whole = kept
        self._known.add(generation)

    def newest(self) -> dict[str, Any] | None:
        """Return the description of the run's newest intact backup.

        The entry "generation" is the backup's number. Returns None if there is
        no backup. Raises a RuntimeError if all backups are damaged.
        """
        (generations, *_) = self._together(self._folder.generations)
        self._known = set(generations)
        damage: list[str] = []
        for generation in generations:
            _, errors = self._attempt(
                functools.partial(self._verify, generation)
            )
            if not errors:
                self._whole = [generation]
                self.replaced = [n for n in generations if n > generation]
                if damage and self._group.worker == 0:
                    warnings.warn(
                        f"Newer backups cannot be read: {'; '.join(damage)}. "
                        f"Restoring backup {generation:08} instead.",
                        stacklevel=2,
                    )
                return {
                    "generation": generation,
                    **self._folder.content(generation),
                }
            damage += errors
        if damage:
            keep = " To keep two backups, pass `double_checkpoint=True`."
            raise RuntimeError(
                "A backup must be readable and intact. Received: "
                f"{'; '.join(damage)}. In {str(self._folder.path)!r}, make the "
                "files readable, replace them with intact copies, or delete "
                "them to start from the beginning. If they belong to another "
                "run, move them to another folder."
                f"{keep if self._backups == 1 else ''}"
            )
        return None

    def restore(self, content: dict[str, Any], section: str) -> None:
        """Restore a section of the state, and `State.sparse_gradients`."""
        self._state.check(content, section)
        self._state.settle()
        count, local = self._group.workers, self._local_replicas
        first = self._group.worker * local
        with ExitStack() as files:
            reader = BackupReader(self._folder, content, files)
            for i, variable in enumerate(self._state.sections[section]):
                values = redistribute(
                    self._state.is_summed(variable),
                    reader.is_identical(section, i),
                    functools.partial(reader.read, section, i),
                    reader.replica_counts,
                    (count, local),
                    range(first, first + local),
                    self._state.is_owned(variable),
                )
                components = self._state.components(variable)
                for component, value in zip(components, values, strict=False):
                    component.assign(value)
        self._state.sparse_gradients = content["sparse_gradients"]

    def restore_seed(self, content: dict[str, Any]) -> None:
        """Restore this worker's global seed generator, if it was backed up."""
        own = content["seeds"][self._group.worker :][:1]
        if own and own[0] is not None:
            set_global_seed(own[0])

    def delete(self) -> bool:
        """Delete the run's backups, unless a variable is not finite.

        Returns False if backups are kept for this reason, and True otherwise.
        Worker 0 deletes the backups after all workers have called this method.
        """
        values = self._state.values()
        path = find_not_finite(self._state, values, self._group)
        is_kept = path is not None and bool(self._whole)
        if self._group.worker == 0 and is_kept:
            warnings.warn(
                "Backups are deleted only if a run ends with finite variables. "
                f"Received: NaN or inf in {path}. The last backup, "
                f"{self._whole[0]:08} in {str(self._folder.path)!r}, is kept. "
                "Check the data, and start again from this backup with a lower "
                "learning rate or with `clipnorm`.",
                stacklevel=2,
            )
        elif self._group.worker == 0:
            self._clear()
        return not is_kept

    def _clear(self) -> None:
        """Delete the run's backups.

        An OSError causes only a warning, since the run is over.
        """
        try:
            self._folder.keep([])
        except OSError as error:
            warnings.warn(
                "`fit` must be able to delete its backups when it ends. "
                f"Received: {error}. Delete this run's backups in "
                f"{str(self._folder.path)!r} before you start the run again.",
                stacklevel=3,
            )

    def _own(
        self, values: Values, identical: set[str]
    ) -> dict[str, np.ndarray]:
        """Return the arrays that this worker must write."""
        arrays: dict[str, np.ndarray] = {}
        for name, copies in values.items():
            if name not in identical:
                # A plain variable has one copy for all replicas of a process.
                if len(copies) == 1:
                    copies = copies * self._local_replicas
                arrays |= {f"{name}.{i}": copy for i, copy in enumerate(copies)}
            elif self._group.worker == 0:
                arrays[name] = copies[0]
        return arrays

    def _commit(
        self, generation: int, content: dict[str, Any], kept: Sequence[int]
    ) -> None:
        if self._group.worker == 0:
            self._folder.commit(generation, content)
            self._folder.keep(kept)

    def _verify(self, generation: int) -> None:
        """Check a backup's description, and some of the backup's files.

        The workers divide the files, so that each file is checked once.
        """
        digests = self._folder.content(generation)["parts"]
        own = range(self._group.worker, len(digests), self._group.workers)
        for worker in own:
            self._folder.check_file(generation, worker, digests[worker])

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on all workers; return their results.

        If `action` raises an OSError or a DamagedError on any worker, all
        workers raise a RuntimeError.
        """
        results, errors = self._attempt(action)
        if errors:
            raise RuntimeError(
                "All workers must be able to use `backup_dir`. Received: "
                f"{'; '.join(errors)}. The last backup, if any, is kept. "
                "Fix the problem, then start again."
            )
        return results

    def _attempt(
        self, action: Callable[[], Any]
    ) -> tuple[list[Any], list[str]]:
        """Run `action` on all workers; return results and error messages."""
        result, error = None, None
        try:
            result = action()
        except _FILE_ERRORS as caught:
            error = f"{caught} (worker {self._group.worker})"
        outcomes = gather(self._group, [result, error])
        return (
            [result for result, _ in outcomes],
            [error for _, error in outcomes if error is not None],
        )
