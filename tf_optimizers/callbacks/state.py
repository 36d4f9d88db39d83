"""The state of a training: what all replicas have alike, and each one's own."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers.base.replicas import backend_variable

# What a process has of every variable, by name.
Values: TypeAlias = dict[str, list[np.ndarray]]


class State:
    """The variables of a built model, its optimizer and its metrics."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._may_be_infinite: set[int] = set()

    @property
    def sections(self) -> dict[str, list[keras.Variable]]:
        """The variables that outlive an epoch, and those that do not."""
        optimizer = self._model.optimizer
        slots = [] if optimizer is None else list(optimizer.variables)
        return {
            "lasting": [*self._model.variables, *slots],
            "metrics": self._model.metrics_variables,
        }

    def components(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        """Return the copies of a variable in this process.

        One for each replica or, of some that the host keeps, one for all.
        """
        return self._model.distribute_strategy.experimental_local_results(
            backend_variable(variable)
        )

    def values(self) -> Values:
        """Return what this process has of every variable, by name."""
        return {
            f"{section}.{i}": self._values_of(variable)
            for section, variables in self.sections.items()
            for i, variable in enumerate(variables)
        }

    def accept_infinite(self) -> None:
        """Take inf for meant where it is, as in a mask or a minimum so far."""
        self._may_be_infinite = {
            i
            for i, variable in enumerate(self.sections["lasting"])
            if not variable.trainable
            and not _are(np.isfinite, self._values_of(variable))
        }

    def first_not_finite(self, values: Values) -> int | None:
        """Return the number of a lasting variable that nobody wants back.

        Metrics may be anything.
        """
        for i in range(len(self.sections["lasting"])):
            is_right = _is_number if i in self._may_be_infinite else np.isfinite
            if not _are(is_right, values[f"lasting.{i}"]):
                return i
        return None

    def _values_of(self, variable: keras.Variable) -> list[np.ndarray]:
        return [part.numpy() for part in self.components(variable)]

    def is_summed(self, variable: keras.Variable) -> bool:
        """Tell a variable of which every replica has a share."""
        # Keras does not say it of accumulators. A host's are the sum already,
        # and say so, whatever optimizer is around its own.
        is_accumulator = "gradient_accumulator" in variable.path
        return variable.aggregation == ("none" if is_accumulator else "sum")

    def describe(self) -> dict[str, Any]:
        """Return what a backup must have in common with the model."""
        return {
            "optimizer": type(self._model.optimizer).__name__,
            "sections": {
                section: [_description(v) for v in variables]
                for section, variables in self.sections.items()
            },
        }

    def check(self, saved: dict[str, Any], section: str) -> None:
        """Raise unless `describe` said the same of a section, paths aside."""
        described = self.describe()
        mine = described["sections"][section]
        others = saved["sections"][section]
        pairs = [
            ("optimizer", described["optimizer"], saved["optimizer"]),
            *(
                (new[2], _without_path(new), _without_path(old))
                for new, old in zip(mine, others, strict=False)
            ),
            ("number of variables", len(mine), len(others)),
        ]
        for name, here, there in pairs:
            if here != there:
                raise ValueError(
                    "A backup must be of the same model and optimizer. "
                    f"Received: {name} is {here} here, and {there} in the "
                    "backup. Build the same model, or start anew with another "
                    "`backup_dir`."
                )


def shares(
    is_summed: bool,
    read: Callable[[int], np.ndarray],
    old: tuple[int, int],
    new: tuple[int, int],
    own: Sequence[int],
) -> list[np.ndarray]:
    """Return the values of some replicas, from those of as many or others.

    What replicas add up to is conserved; of what they do not add up, the first
    replica's is as good as any. As many are still others if fewer workers have
    more of them each, since those of one worker may have to be equal.

    Args:
        is_summed: Whether replicas add up.
        read: Returns the saved value of a replica.
        old: How many workers there were, and the replicas of each.
        new: How many there are, likewise.
        own: The replicas whose values are wanted.
    """
    if old == new:
        return [read(replica) for replica in own]
    first = read(0)
    if is_summed:
        total = first.astype(np.float64)
        for replica in range(1, math.prod(old)):
            total = total + read(replica)
        first = (total / math.prod(new)).astype(first.dtype)
    return [first] * len(own)


def _description(variable: keras.Variable) -> list[Any]:
    """Return dtype, shape and path, and what it means if that may differ."""
    meaning = getattr(variable, "meaning", None)
    what = [variable.dtype, list(variable.shape), variable.path]
    return [*what, meaning] if meaning else what


def _without_path(described: list[Any]) -> str:
    dtype, shape, _, *meaning = described
    return " ".join([dtype, str(shape), *meaning])


def _are(is_right: Callable, values: Sequence[np.ndarray]) -> bool:
    """Tell whether all elements of values are right, if they are floats."""
    return all(
        np.all(is_right(value))
        for value in values
        if keras.backend.is_float_dtype(str(value.dtype))
    )


def _is_number(value: np.ndarray) -> np.ndarray:
    return ~np.isnan(value)
