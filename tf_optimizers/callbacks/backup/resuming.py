"""Reads backups, sets learning rates, and skips batches of resumed epochs."""

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers._compat.keras_internals import build_metrics
from tf_optimizers.callbacks.backup.files import Folder, with_zeros
from tf_optimizers.callbacks.backup.state import State


class BackupReader:
    """Reads the values of a backup.

    Args:
        folder: The folder of the backup.
        content: The description of the backup, from `Archive.newest`.
        files: The stack that closes the backup's files.

    Attributes:
        replica_counts: The number of workers that wrote the backup, and the
            number of replicas on each of these workers.
    """

    def __init__(
        self, folder: Folder, content: dict[str, Any], files: ExitStack
    ) -> None:
        self._content = content
        self._identical = set(content["alike"])
        workers = len(content["parts"])
        self.replica_counts = (workers, content["replicas"] // workers)
        self._open = functools.cache(
            lambda worker: files.enter_context(
                folder.open_file(content["generation"], worker)
            )
        )

    def is_identical(self, section: str, number: int) -> bool:
        """Return whether all replicas had the same value of a variable."""
        return f"{section}.{number}" in self._identical

    def read(self, section: str, number: int, replica: int) -> np.ndarray:
        """Return a replica's value of a variable."""
        dtype, shape, *_ = self._content["sections"][section][number]
        name, worker = f"{section}.{number}", 0
        if not self.is_identical(section, number):
            worker, local_rank = divmod(replica, self.replica_counts[1])
            name = f"{name}.{local_rank}"
        dtype = tf.as_dtype(dtype).as_numpy_dtype
        return with_zeros(self._open(worker), name, dtype, shape)


# For each model: the rate variables, their values when `note` was last called,
# and the script's rates.
_NOTED: weakref.WeakKeyDictionary[
    keras.Model, list[tuple[keras.Variable, float, float]]
] = weakref.WeakKeyDictionary()


class Rates:
    """The learning rates that a script has given to optimizers.

    A constant rate is part of the optimizer's state, so restoring a backup also
    restores the rate. A backup also records the script's rates. If the script
    now has a different rate, `set` applies that rate.

    The script's rate is the rate when `fit` begins, unless a callback has set
    that rate in an earlier `fit`.

    Args:
        model: The model.
        state: The model's state, not yet restored.

    Attributes:
        given: The script's rates, in the order of `state.slots`.
    """

    def __init__(self, model: keras.Model, state: State) -> None:
        self._model, self._state = model, state
        # Search only optimizers' variables: a weight may have such a name, too.
        self._variables = [
            variable
            for variable in state.slots
            if variable.path.endswith("learning_rate") and variable.shape == ()
        ]
        self.given = list(map(self._given, self._variables))

    def _given(self, variable: keras.Variable) -> float:
        rate = float(variable.numpy())
        for other, noted, given in _NOTED.get(self._model, ()):
            if other is variable and rate == noted:
                return given
        return rate

    def note(self) -> None:
        """Record the current rates, which callbacks may have set."""
        _NOTED[self._model] = [
            (variable, float(variable.numpy()), given)
            for variable, given in zip(self._variables, self.given, strict=True)
        ]

    def set(self, content: dict[str, Any]) -> str:
        """Set the rates that the script has changed since the backup.

        Returns a warning, or "" if no rate has changed.
        """
        warning = ""
        for variable, old, new in zip(
            self._variables, content["rates"], self.given, strict=False
        ):
            if old != new:
                warning = warning or (
                    "A resumed run uses the learning rate of its backup, "
                    "unless the script has changed the rate. Received: the "
                    f"script sets {variable.path}={new:g}, but had set {old:g} "
                    "before the backup. This `fit` uses the new rate. To "
                    "continue with the rate of the backup, pass the old rate."
                )
                for component in self._state.components(variable):
                    component.assign(new)
        return warning


def undo_before_training(model: keras.Model, undo: Callable[[], None]) -> None:
    """Call `undo` when Keras next calls a model's `make_train_function`.

    Keras calls this method before any training. A callback could not call
    `undo`: if `fit` ends with an exception, Keras calls no callback.
    """

    def make_train_function(*args: Any, **kwargs: Any) -> Any:
        cancel_undoing(model)
        undo()
        return model.make_train_function(*args, **kwargs)

    model.make_train_function = make_train_function


def cancel_undoing(model: keras.Model) -> None:
    """Cancel `undo_before_training`: remove the method that it has set."""
    vars(model).pop("make_train_function", None)


class Skip:
    """Replaces a model's train function: reads batches without training.

    The model gets its own train function back after the last skipped batch,
    when `end` is called, or before any other training begins.

    Args:
        model: The model.
        batches: The number of batches to skip.
        restore: Sets the state and the metrics to their values after the
            skipped batches.
    """

    def __init__(
        self,
        model: keras.Model,
        batches: int,
        restore: Callable[[], None],
    ) -> None:
        self.remaining = batches
        self._model = model
        self.restore = restore
        self._logs: dict[str, Any] | None = None
        self._train: Callable = model.train_function
        model.train_function = self
        undo_before_training(model, self.end)

    def __call__(self, iterator: Any) -> dict[str, Any]:
        """Read `steps_per_execution` batches, or fewer if fewer remain."""
        for _ in range(min(self._model.steps_per_execution, self.remaining)):
            batch = next(iterator)
            self.remaining -= 1
        if self._logs is None:
            build_metrics(self._model, batch)
            self.restore()
            self._logs = self._model.get_metrics_result()
        if self.remaining <= 0:
            self.end()
        return self._logs

    def end(self) -> None:
        """Restore the model's own train function."""
        cancel_undoing(self._model)
        if self._model.train_function is self:
            self._model.train_function = self._train


def check_executions(steps: int, seen: int) -> None:
    """Raise if a backup was made within an execution of `steps` batches."""
    if seen % steps:
        raise ValueError(
            "`steps_per_execution` must divide the number of batches between "
            "the start of the epoch and the backup. Received: "
            f"steps_per_execution={steps}, and a backup after {seen} batches. "
            "Pass the same value as before."
        )


def check_batches(batches: int, seen: int) -> None:
    """Raise if an epoch ends before the batch of its backup."""
    if batches < seen:
        raise ValueError(
            "A resumed epoch must reach the batch of its backup. "
            f"Received: {batches} batches per epoch, and a backup after "
            f"{seen} batches. Pass as many batches as before, of the "
            "same size, or start over with another `backup_dir`."
        )
