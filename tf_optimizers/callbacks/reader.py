"""The values of a backup, by variable and replica."""

import functools
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf

from tf_optimizers.callbacks.files import Folder


class Reader:
    """Reads the values of a backup.

    Args:
        folder: Where the backup is.
        content: Its description, as `Archive.newest` returns it.
        files: Closes its files.

    Attributes:
        layout: How many workers wrote it, and how many replicas each had.
    """

    def __init__(
        self, folder: Folder, content: dict[str, Any], files: ExitStack
    ) -> None:
        self._content = content
        self._alike = set(content["alike"])
        workers = len(content["parts"])
        self.layout = (workers, content["replicas"] // workers)
        self._open = functools.cache(
            lambda worker: files.enter_context(
                folder.open_part(content["generation"], worker)
            )
        )

    def is_alike(self, section: str, number: int) -> bool:
        """Tell a variable that had the same value on all replicas."""
        return f"{section}.{number}" in self._alike

    def read(self, section: str, number: int, replica: int) -> np.ndarray:
        """Return the value that a variable had on a replica."""
        dtype, shape, *_ = self._content["sections"][section][number]
        name, worker = f"{section}.{number}", 0
        if not self.is_alike(section, number):
            worker, local_rank = divmod(replica, self.layout[1])
            name = f"{name}.{local_rank}"
        raw = self._open(worker)[name]
        return raw.view(tf.as_dtype(dtype).as_numpy_dtype).reshape(shape)
