"""Reads backups, sets rates, and skips batches that were seen before."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers._compat.keras_internals import build_metrics
from tf_optimizers.callbacks.backup.files import Folder, with_zeros
from tf_optimizers.callbacks.backup.state import State


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
        dtype = tf.as_dtype(dtype).as_numpy_dtype
        return with_zeros(self._open(worker), name, dtype, shape)


class Rates:
    """The learning rates that optimizers have when `fit` begins.

    Keras keeps a rate that is a number among the optimizer's state, so that
    restoring sets it to what it was. If the script gives another one than it
    gave before, that one is meant to be used.

    Args:
        state: Of the model; nothing is restored yet.

    Attributes:
        given: The rates, in the order of `state`.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._variables = [
            variable
            for variable in state.slots  # A weight may have that name.
            if variable.path.endswith("learning_rate") and variable.shape == ()
        ]
        self.given = [float(v.numpy()) for v in self._variables]

    def set(self, content: dict[str, Any]) -> str:
        """Set rates that are not those that the run of a backup was given.

        Returns a warning, which is empty if there are none.
        """
        before = content.get("rates", self.given)  # 0.1.0 has kept none.
        warning = ""
        for variable, old, new in zip(
            self._variables, before, self.given, strict=False
        ):
            if old != new:
                warning = warning or (
                    "A run resumes with the learning rate that it had, unless "
                    "the script gives another than before. Received: "
                    f"{variable.path}={new:g}, which was {old:g} when the run "
                    "began. The new one is used. To go on with that of the "
                    "backup, give the old one."
                )
                for part in self._state.components(variable):
                    part.assign(new)
        return warning


def undo_before_training(model: keras.Model, undo: Callable[[], None]) -> None:
    """Call `undo` when Keras next asks for a model's train function.

    All training begins with that. When `fit` ends with an exception, Keras
    calls no callback, and what one has done to the model would stay.
    """

    def make_train_function(*args: Any, **kwargs: Any) -> Any:
        cancel_undoing(model)
        undo()
        return model.make_train_function(*args, **kwargs)

    model.make_train_function = make_train_function


def cancel_undoing(model: keras.Model) -> None:
    """Give the model the method of its class back."""
    vars(model).pop("make_train_function", None)


class Skip:
    """A model's train function that draws batches without training on them.

    The model gets its own function back after the last of these batches, when
    `end` is called, and before anything else trains. `restore_metrics` sets
    the metrics to what they were after these batches.
    """

    def __init__(
        self,
        model: keras.Model,
        batches: int,
        restore_metrics: Callable[[], None],
    ) -> None:
        self.remaining = batches
        self._model = model
        self._restore_metrics = restore_metrics
        self._logs: dict[str, Any] | None = None
        self._train: Callable = model.train_function
        model.train_function = self
        undo_before_training(model, self.end)

    def __call__(self, iterator: Any) -> dict[str, Any]:
        """Draw as many batches as a call would train on, if so many remain."""
        for _ in range(min(self._model.steps_per_execution, self.remaining)):
            batch = next(iterator)
            self.remaining -= 1
        if self._logs is None:
            build_metrics(self._model, batch)
            self._restore_metrics()
            self._logs = self._model.get_metrics_result()
        if self.remaining <= 0:
            self.end()
        return self._logs

    def end(self) -> None:
        """Give the model its own train function back, if it lacks it."""
        cancel_undoing(self._model)
        if self._model.train_function is self:
            self._model.train_function = self._train


def check_executions(steps: int, seen: int) -> None:
    """Raise if a backup was made within what is now one execution."""
    if seen % steps:
        raise ValueError(
            "`steps_per_execution` must divide the batches that a backup has "
            f"seen of an epoch. Received: steps_per_execution={steps}, and a "
            f"backup after {seen} batches. Pass as many as before."
        )


def check_batches(batches: int, seen: int) -> None:
    """Raise if a backup has seen more batches of an epoch than there are."""
    if batches < seen:
        raise ValueError(
            "An epoch must have at least as many batches as a backup has seen "
            f"of it. Received: {batches} batches an epoch, and a backup after "
            f"{seen}. Pass as many batches as before, of the same size, or "
            "start over with another `backup_dir`."
        )
