"""Collects the state of a run: shared state, and each replica's own state."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers._compat import distinct
from tf_optimizers._compat.owned import array_of
from tf_optimizers.replicas import local_copies
from tf_optimizers.sharded_state import ShardedState
from tf_optimizers.wrapped import (
    every_optimizer,
    has_common_weights,
    kind_of,
    local_steppers,
    optimizers_of,
    with_updated_variables,
)

# The values of this process's copies of each variable. A key consists of the
# section and the variable's index in the section, such as "lasting.0".
Values: TypeAlias = dict[str, list[np.ndarray]]


class State:
    """The variables of a built model, its optimizers and its metrics."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._may_be_infinite: set[int] = set()

    @property
    def sections(self) -> dict[str, list[keras.Variable]]:
        """The variables by section, "lasting" or "metrics".

        "lasting" contains the variables of the model and its optimizers.
        "metrics" contains the variables of metrics, which belong to the current
        epoch.
        """
        return {
            "lasting": [
                *with_updated_variables(self._model, self._model.variables),
                *self.slots,
            ],
            "metrics": self._model.metrics_variables,
        }

    @property
    def slots(self) -> list[keras.Variable]:
        """The variables of the optimizers."""
        # A wrapper and its inner optimizer may list the same variables.
        return distinct(
            variable
            for optimizer in optimizers_of(self._model).values()
            for variable in optimizer.variables
        )

    def components(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        """Return the copies of a variable in this process.

        There is one copy per replica, or a single copy of a plain variable, for
        example on the host.
        """
        return local_copies(self._model.distribute_strategy, variable)

    def settle(self) -> None:
        """Wait until background exchanges have updated their variables."""
        for optimizer in local_steppers(self._model):
            optimizer.finish_exchange()

    def values(self) -> Values:
        """Return the values of this process's copies of all variables."""
        self.settle()
        return {
            f"{section}.{i}": self._values_of(variable)
            for section, variables in self.sections.items()
            for i, variable in enumerate(variables)
        }

    def metrics(self) -> list[tuple[Any, np.ndarray]]:
        """Return this process's copies of metric variables and their values."""
        return [
            (component, array_of(component))
            for variable in self.sections["metrics"]
            for component in self.components(variable)
        ]

    def accept_infinite(self) -> None:
        """Accept inf in the non-trainable variables that are not finite now.

        For example, a mask may contain inf.
        """
        self._may_be_infinite = {
            i
            for i, variable in enumerate(self.sections["lasting"])
            if not variable.trainable
            and not _holds_for_all(np.isfinite, self._values_of(variable))
        }

    def first_not_finite(self, values: Values) -> int | None:
        """Return the index of the first variable with NaN or inf, or None.

        Only "lasting" variables are checked. Inf is accepted in the variables
        that `accept_infinite` has found.
        """
        for i in range(len(self.sections["lasting"])):
            is_right = _is_number if i in self._may_be_infinite else np.isfinite
            if not _holds_for_all(is_right, values[f"lasting.{i}"]):
                return i
        return None

    def _values_of(self, variable: keras.Variable) -> list[np.ndarray]:
        return list(map(array_of, self.components(variable)))

    def is_summed(self, variable: keras.Variable) -> bool:
        """Return whether the replicas' values add up to a variable's value."""
        # Keras's accumulators have the aggregation "none", but each replica
        # adds only its own gradients. An accumulator on the host contains the
        # whole sum, and has another aggregation. A layer's variable may have
        # the same name, so require a variable of an optimizer.
        is_accumulator = variable.path.endswith("_gradient_accumulator") and (
            any(variable is slot for slot in self.slots)
        )
        return variable.aggregation == ("none" if is_accumulator else "sum")

    def is_owned(self, variable: keras.Variable) -> bool:
        """Return whether replicas may store different rows of a variable.

        If they do, each row is 0 on all replicas but one.
        """
        return not self.is_summed(variable) and any(
            variable is slot
            for each in every_optimizer(self._model)
            if isinstance(each, ShardedState)
            for slot in each.variables
        )

    @property
    def has_common_weights(self) -> bool:
        """Whether all replicas must have equal weights now.

        Between synchronizations of `SparseLoCo`, weights may differ.
        """
        return has_common_weights(self._model)

    @property
    def sparse_gradients(self) -> list[Sequence[int] | None]:
        """The indices of variables with sparse gradients.

        There is an entry for each `SparseLoCo` with several local steps: None
        while the indices are unknown.
        """
        return [each.sparse_gradients for each in local_steppers(self._model)]

    @sparse_gradients.setter
    def sparse_gradients(self, seen: list[Sequence[int] | None]) -> None:
        steppers = local_steppers(self._model)
        for optimizer, indices in zip(steppers, seen, strict=False):
            if indices is not None:
                optimizer.expect_sparse_gradients(indices)

    def describe(self) -> dict[str, Any]:
        """Return the part of a backup's description that `check` compares."""
        return {
            "optimizer": ", ".join(
                map(kind_of, optimizers_of(self._model).values())
            ),
            "sections": {
                section: [_description(v) for v in variables]
                for section, variables in self.sections.items()
            },
        }

    def check(self, saved: dict[str, Any], section: str) -> None:
        """Raise if a saved section is from another model or optimizer.

        Paths of variables need not be equal.
        """
        described = self.describe()
        mine = described["sections"][section]
        others = saved["sections"][section]
        pairs = [
            ("the optimizer", described["optimizer"], saved["optimizer"]),
            *(
                (new[2], _without_path(new), _without_path(old))
                for new, old in zip(mine, others, strict=False)
            ),
            ("the number of variables", len(mine), len(others)),
        ]
        what = "metrics" if section == "metrics" else "model and optimizer"
        for name, here, there in pairs:
            if here != there:
                raise ValueError(
                    f"A backup needs the same {what}. "
                    f"Received: {name} is {here} in this run, and {there} in "
                    f"the backup. Use the same {what}, or start over with "
                    "another `backup_dir`."
                )


def redistribute(
    is_summed: bool,
    is_identical: bool,
    read: Callable[[int], np.ndarray],
    old: tuple[int, int],
    new: tuple[int, int],
    own: Sequence[int],
    is_owned: bool = False,
) -> list[np.ndarray]:
    """Return a variable's values on the `own` replicas, from a backup.

    If the number of workers or replicas has changed, the values are converted:

    - Values that add up are divided evenly. If a total of integers leaves a
      remainder, the first replicas get 1 more.
    - If replicas stored different rows, every replica gets all rows.
    - Other floating-point values become their mean on every replica.
    - All other values become the first replica's value on every replica.

    Args:
        is_summed: Whether the replicas' values add up.
        is_identical: Whether all replicas had the same value.
        read: Returns the saved value of a replica.
        old: In the backup, the numbers of workers and of replicas per worker.
        new: The same numbers now.
        own: The replicas whose values to return.
        is_owned: Whether each row is 0 on all replicas but one. Has no effect
            if `is_identical`.
    """
    if old == new:
        return [read(replica) for replica in own]
    first = read(0)
    is_number = keras.backend.is_float_dtype(str(first.dtype))
    if is_summed and not is_number:
        saved = [read(replica) for replica in range(math.prod(old))]
        total = np.sum(saved, axis=0, dtype=int)
        each, rest = np.divmod(total, math.prod(new))
        return [(each + (r < rest)).astype(first.dtype) for r in own]
    if is_summed or ((is_owned or is_number) and not is_identical):
        total = first.astype(np.float64)
        for replica in range(1, math.prod(old)):
            total = total + read(replica)
        divisor = 1 if is_owned else math.prod(new if is_summed else old)
        first = (total / divisor).astype(first.dtype)
    return [first] * len(own)


def _description(variable: keras.Variable) -> list[Any]:
    """Return a variable's dtype, shape, path and, if set, its `meaning`."""
    meaning = getattr(variable, "meaning", None)
    what = [variable.dtype, list(variable.shape), variable.path]
    return [*what, meaning] if meaning else what


def _without_path(described: list[Any]) -> str:
    dtype, shape, _, *meaning = described
    return " ".join([dtype, str(shape), *meaning])


def _holds_for_all(is_right: Callable, values: Sequence[np.ndarray]) -> bool:
    """Return whether `is_right` holds for all floating-point elements."""
    return all(
        np.all(is_right(value))
        for value in values
        if keras.backend.is_float_dtype(str(value.dtype))
    )


def _is_number(value: np.ndarray) -> np.ndarray:
    return ~np.isnan(value)
