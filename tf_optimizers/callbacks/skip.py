"""Skipping the batches of an epoch that were seen before a backup."""

from collections.abc import Callable
from typing import Any

import keras

from tf_optimizers._compat.keras import build_metrics


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
