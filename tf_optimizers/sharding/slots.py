"""Creates the slots of an inner optimizer where they are owned."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_optimizers._compat.owned import OwnedVariable, owned_variable
from tf_optimizers.agreement.workers import Workers


class Slot(NamedTuple):
    """A variable of an optimizer, and the replica that has it."""

    variable: OwnedVariable
    owner: int


class Slots:
    """The state that an optimizer makes while it is built.

    What it makes while it goes through the variables belongs to the one it is
    at, whose owner alone has it. What it makes beside is shared: every replica
    has it.

    Args:
        strategy: The strategy.
        owners: The owner of each variable.

    Attributes:
        owned: The slots.
        shared: What every replica has, of a floating dtype.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, owners: Sequence[int]
    ) -> None:
        self.owned: list[Slot] = []
        self.shared: list[tf.Variable] = []
        self._strategy = strategy
        self._owners = owners
        self._current: int | None = None

    @contextlib.contextmanager
    def of(self, variables: Sequence[Any]) -> Iterator[list[Any]]:
        """Return a scope to build in, and a list to build with."""
        with tf.variable_creator_scope(self._create):
            yield _Watched(variables, self._note)

    def _note(self, index: int | None) -> None:
        self._current = index

    def _create(self, next_creator: Callable, **kwargs: Any) -> Any:
        is_floating = tf.as_dtype(kwargs["dtype"]).is_floating
        if self._current is None or not is_floating:
            variable = next_creator(**kwargs)
            if is_floating:
                self.shared.append(variable)
            return variable
        owner = self._owners[self._current]
        initial = kwargs["initial_value"]
        value = tf.convert_to_tensor(
            initial() if callable(initial) else initial, kwargs["dtype"]
        )
        variable = owned_variable(
            *(self._strategy, self._local_rank(owner), value),
            kwargs.get("name") or "slot",
        )
        self.owned.append(Slot(variable, owner))
        return variable

    def _local_rank(self, replica: int) -> int | None:
        workers = Workers(self._strategy)
        worker, rank = divmod(replica, workers.local_replicas)
        return rank if worker == workers.index else None


class _Watched(list):
    """A list that tells at which of its elements a loop is."""

    def __init__(
        self, elements: Sequence[Any], note: Callable[[int | None], None]
    ) -> None:
        super().__init__(elements)
        self._note = note

    def __iter__(self) -> Iterator[Any]:
        try:
            for i, element in enumerate(super().__iter__()):
                self._note(i)
                yield element
        finally:
            self._note(None)
