"""Creates the slots of an inner optimizer where they are owned."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.owned import OwnedVariable, Rows, owned_variable
from tf_optimizers._compat.replicas import creator_scope
from tf_optimizers.agreement.workers import Workers
from tf_optimizers.sharding.ownership import Piece


class Slots:
    """The state that an optimizer makes while it is built.

    What it makes while it goes through the variables belongs to the one it is
    at, whose owners alone have it: each the rows that it owns. What it makes
    beside is shared: every replica has it. So are gradient accumulators, in
    which replicas have sums of their own.

    Args:
        strategy: The strategy.
        pieces: The owners of the variables.
        devices: Where the state is, of this process's replicas.

    Attributes:
        owned: The slots, once with each piece.
        shared: What every replica has alike, of a floating dtype.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        pieces: Sequence[Piece],
        devices: Sequence[str],
    ) -> None:
        self.owned: list[tuple[OwnedVariable, Piece]] = []
        self.shared: list[tf.Variable] = []
        self._strategy = strategy
        self._pieces = pieces
        self._devices = devices
        self._current: tuple[int, Any] | None = None

    @contextlib.contextmanager
    def of(self, variables: Sequence[Any]) -> Iterator[list[Any]]:
        """Return a scope to build in, and a list to build with."""
        # Before optimizers that create their state on the host themselves.
        with creator_scope(self._create, priority=200):
            yield _Watched(variables, self._note)

    def _note(self, current: tuple[int, Any] | None) -> None:
        self._current = current

    def _create(self, next_creator: Callable, **kwargs: Any) -> Any:
        name = kwargs.get("name") or "slot"
        if not tf.as_dtype(kwargs["dtype"]).is_floating or name.endswith(
            "_gradient_accumulator"
        ):
            return next_creator(**kwargs)
        initial = kwargs["initial_value"]
        value = initial() if callable(initial) else initial
        value = tf.convert_to_tensor(value, kwargs["dtype"])
        pieces = self._pieces_of_shape(value.shape)
        if not pieces:
            variable = next_creator(**kwargs)
            self.shared.append(variable)
            return variable
        held: list[Rows | None] = [None] * len(self._devices)
        first = Workers(self._strategy).index * len(held)
        for piece in pieces:
            if 0 <= piece.owner - first < len(held):
                held[piece.owner - first] = piece.rows
        variable = owned_variable(
            self._strategy, self._devices, held, value, name
        )
        self.owned += [(variable, piece) for piece in pieces]
        return variable

    def _pieces_of_shape(self, shape: tf.TensorShape) -> list[Piece]:
        """Return the owners of what is made; none of what is shared."""
        if self._current is None:
            return []
        index, variable = self._current
        pieces = [piece for piece in self._pieces if piece.position == index]
        is_like_it = pieces[0].is_whole or shape == variable.shape
        return pieces if is_like_it else []


class _Watched(list):
    """A list that tells at which of its elements a loop is."""

    def __init__(
        self,
        elements: Sequence[Any],
        note: Callable[[tuple[int, Any] | None], None],
    ) -> None:
        super().__init__(elements)
        self._note = note

    def __iter__(self) -> Iterator[Any]:
        try:
            for pair in enumerate(super().__iter__()):
                self._note(pair)
                yield pair[1]
        finally:
            self._note(None)
