"""The values of a backup, by variable and replica."""

from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf

from tf_optimizers.callbacks.files import Folder


class Reader:
    """Reads the values of a backup.

    Args:
        folder: Where it is.
        content: What it is, as `Archive.newest` returns it.
        files: Closes them.

    Attributes:
        layout: How many workers wrote it, and the replicas of each.
    """

    def __init__(
        self, folder: Folder, content: dict[str, Any], files: ExitStack
    ) -> None:
        self._folder = folder
        self._content = content
        self._files = files
        self._alike = set(content["alike"])
        workers = len(content["parts"])
        self.layout = (workers, content["replicas"] // workers)
        self._open: dict[int, Any] = {}

    def read(self, section: str, number: int, replica: int) -> np.ndarray:
        """Return the value that a variable had on a replica."""
        dtype, shape, _ = self._content["sections"][section][number]
        name, part = f"{section}.{number}", 0
        if name not in self._alike:
            part, local_rank = divmod(replica, self.layout[1])
            name = f"{name}.{local_rank}"
        raw = self._part(part)[name]
        return raw.view(tf.as_dtype(dtype).as_numpy_dtype).reshape(shape)

    def _part(self, worker: int) -> Any:
        if worker not in self._open:
            self._open[worker] = self._files.enter_context(
                self._folder.open_part(self._content["generation"], worker)
            )
        return self._open[worker]
