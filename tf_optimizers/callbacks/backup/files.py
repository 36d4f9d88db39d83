"""Writes backups atomically, and checks whether backups are intact.

A folder contains backups, called generations, which are numbered from 1:

    00000007.json          the description, with the digests of the other files
    00000007.worker-0.npz  arrays of worker 0, by name
    00000007.worker-1.npz

A file gets its name once it is complete. The .json is written last: without a
.json, a backup counts as incomplete. Every file also contains the run's name.
Several runs may share a folder, but must not run at the same time: each run
deletes its own old backups, and all incomplete files. No file contains code.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tf_optimizers.codes.digests import as_bytes

# Errors of `fsync` that mean lost data. Some network file systems raise other
# errors, since they do not support `fsync` of files or folders.
_DATA_LOSS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
# Rows of zeros at the start and end of an array are not stored. Instead, a
# second array is stored, whose name has this suffix. It contains the range of
# the stored rows: the first row, and the row after the last.
_ROWS_SUFFIX = ".rows"
# In a worker's file, the key of the run's name.
_RUN = "run"
_FILE_NAME = re.compile(r"(\d{8})\.(json|worker-\d+\.npz)(\.partial)?")


class DamagedError(Exception):
    """A file of a backup is missing or damaged, or has an old format."""


class Folder:
    """The folder of a run's backups. Other runs may also use the folder.

    The folder is created when the first file is written.

    Args:
        path: The path of the folder.
        name: The name of the run.
        ignored: The numbers of backups to ignore if no file shows their run.
    """

    def __init__(
        self, path: str, name: str = "", ignored: Iterable[int] = ()
    ) -> None:
        self.path = Path(path)
        self.name = name
        self._ignored = set(ignored)
        self._mark: Path | None = None

    def generations(self) -> list[int]:
        """Return the numbers of the run's backups, newest first.

        Include damaged backups that may be of any run. Otherwise, no run would
        report the damage.
        """
        names = {n: self._name_of(n) for n in self._all()}
        return [
            n
            for n, name in names.items()
            if name == self.name or (name is None and n not in self._ignored)
        ]

    def others(self) -> list[str]:
        """Return the names of the other runs that have backups here."""
        names = {self._name_of(n) for n in self._all()} - {self.name}
        return sorted(name for name in names if name is not None)

    def next_generation(self) -> int:
        """Return a number higher than the numbers of all complete backups."""
        return max(self._all(), default=0) + 1

    def write_file(
        self, generation: int, worker: int, arrays: dict[str, np.ndarray]
    ) -> str:
        """Write the file of one worker's arrays; return the file's digest."""
        path = self._file_of(generation, worker)
        raw: dict[str, Any] = {_RUN: np.array([self.name])}
        for name, array in arrays.items():
            raw |= _without_zeros(name, array)
        self._write(
            path, lambda file: np.savez(file, allow_pickle=False, **raw)
        )
        return digest(path)

    def commit(self, generation: int, content: dict[str, Any]) -> None:
        """Write a backup's description, which completes the backup."""
        text = json.dumps({"name": self.name, **content})
        document = {"sha256": _digest_of(text), "content": text}
        self._write(
            self.path / f"{generation:08}.json",
            lambda file: file.write(json.dumps(document).encode()),
        )

    def content(self, generation: int) -> dict[str, Any]:
        """Check and return the description that `commit` wrote."""
        path = self.path / f"{generation:08}.json"
        try:
            document = json.loads(path.read_bytes())
            text, expected = document["content"], document["sha256"]
            is_whole = _digest_of(text) == expected
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(
                f"{path.name} is not a backup ({error})"
            ) from error
        if not is_whole:
            raise DamagedError(f"{path.name} does not match its checksum")
        content = json.loads(text)
        if "name" not in content:
            raise DamagedError(
                f"{path.name} has the format of tf_optimizers 0.1, which this "
                "version cannot read"
            )
        return content

    def check_file(self, generation: int, worker: int, expected: str) -> None:
        """Raise if a worker's file is missing, or has a different digest."""
        path = self._file_of(generation, worker)
        try:
            found = digest(path)
        except FileNotFoundError as error:
            raise DamagedError(f"{path.name} is missing") from error
        if found != expected:
            raise DamagedError(f"{path.name} does not match its checksum")

    def open_file(self, generation: int, worker: int) -> Any:
        """Open a worker's file, a map from names to arrays."""
        return np.load(self._file_of(generation, worker), allow_pickle=False)

    def keep(self, generations: Iterable[int]) -> None:
        """Delete the run's backups except for `generations`.

        Also delete incomplete files, and files of incomplete backups, of all
        runs. Remove the folder if it is then empty.
        """
        mine = {n for n in self._all() if self._name_of(n) == self.name}
        kept = set(self._all()) - (mine - set(generations))
        # Delete the .json first: a backup must not look complete without all
        # workers' files.
        for path in sorted(self._files(), key=lambda path: path.suffix):
            match = _FILE_NAME.fullmatch(path.name)
            if match and (match[3] or int(match[1]) not in kept):
                path.unlink(missing_ok=True)
        if not kept and self.path.is_dir() and not any(self.path.iterdir()):
            with contextlib.suppress(OSError):  # Another run may add a file.
                self.path.rmdir()

    def leave_mark(self) -> str:
        """Write an empty file that other workers look for; return its name."""
        self.path.mkdir(parents=True, exist_ok=True)
        mark = self.path / f".{uuid.uuid4().hex}"
        mark.touch()
        self._mark = mark
        return mark.name

    def sees(self, mark: str) -> bool:
        """Return whether a worker's file `mark` is visible in the folder."""
        return (self.path / mark).exists()

    def remove_mark(self) -> None:
        """Remove the file of `leave_mark`, if there is one."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.unlink()

    def _all(self) -> list[int]:
        """Return the numbers of all complete backups, newest first."""
        found = [_FILE_NAME.fullmatch(path.name) for path in self._files()]
        return sorted(
            (int(m[1]) for m in found if m and m[2] == "json" and not m[3]),
            reverse=True,
        )

    def _name_of(self, generation: int) -> str | None:
        """Return the name of a backup's run, or None if no file shows it."""
        with contextlib.suppress(OSError, DamagedError):
            return self.content(generation)["name"]
        for path in self.path.glob(f"{generation:08}.worker-*.npz"):
            # A damaged file may cause any error. `np.load` does not then close
            # a file that it has opened itself.
            with contextlib.suppress(Exception), path.open("rb") as file:
                return str(np.load(file)[_RUN][0])
        return None

    def _file_of(self, generation: int, worker: int) -> Path:
        return self.path / f"{generation:08}.worker-{worker}.npz"

    def _files(self) -> list[Path]:
        return list(self.path.iterdir()) if self.path.is_dir() else []

    def _write(self, path: Path, write: Callable[[BinaryIO], Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        try:
            with partial.open("wb") as file:
                write(file)
                file.flush()
                _sync(file.fileno())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)  # The disk may be full.
            raise
        # Also flush the folder, which contains the file's name.
        with contextlib.suppress(PermissionError):
            folder = os.open(self.path, os.O_RDONLY)
            try:
                _sync(folder)
            finally:
                os.close(folder)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


def _sync(descriptor: int) -> None:
    """Flush a file or folder to disk; raise only if data may be lost."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in _DATA_LOSS:
            raise


def _without_zeros(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Return an array's bytes, without rows of zeros at its start and end.

    If rows are left out, the result includes the range of the stored rows.
    Rows of zeros are common with `ShardedState`: a replica's copy of a sharded
    variable has zeros in the rows of other replicas.
    """
    raw = as_bytes(array)
    if not array.ndim or not array.size:
        return {name: raw}
    rows = np.flatnonzero(raw.reshape(len(array), -1).any(axis=1))
    first, end = (rows[0], rows[-1] + 1) if len(rows) else (0, 0)
    if end - first == len(array):
        return {name: raw}
    return {
        name: as_bytes(array[first:end]),
        f"{name}{_ROWS_SUFFIX}": np.array([first, end]),
    }


def with_zeros(file: Any, name: str, dtype: Any, shape: list[int]) -> Any:
    """Return an array from a worker's file, with its rows of zeros restored."""
    kept = file[name].view(dtype)
    if f"{name}{_ROWS_SUFFIX}" not in file:
        return kept.reshape(shape)
    first, end = file[f"{name}{_ROWS_SUFFIX}"]
    array = np.zeros(shape, dtype)
    array[first:end] = kept.reshape([end - first, *shape[1:]])
    return array


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
