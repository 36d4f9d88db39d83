"""Creates the slots of an inner optimizer where they are owned."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.keras_internals import variable_key
from tf_optimizers._compat.owned import OwnedVariable, Rows, owned_variable
from tf_optimizers._compat.strategies import replaced
from tf_optimizers._compat.tensorflow_internals import creator_scope
from tf_optimizers.replicas import replicas_of
from tf_optimizers.sharding.ownership import Piece

_ADD = "add_variable_from_reference"


class Slots:
    """The state that an optimizer makes while it is built.

    What it makes by `add_variable_from_reference` belongs to that variable,
    and what else it makes while it goes through the variables to the one it is
    at. The owners of a variable alone have what belongs to it: each the rows
    that it owns. What belongs to none is shared: every replica has it. So are
    gradient accumulators, in which replicas have sums of their own.

    Args:
        strategy: The strategy.
        variables: The model's variables.
        pieces: Their owners.
        devices: Where the state is, of this process's replicas.

    Attributes:
        owned: The slots, once with each piece.
        shared: What every replica has alike, with the position of the variable
            that it belongs to, if any: one of which owners have rows each.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        variables: Sequence[Any],
        pieces: Sequence[Piece],
        devices: Sequence[str],
    ) -> None:
        self.owned: list[tuple[OwnedVariable, Piece]] = []
        self.shared: list[tuple[tf.Variable, int | None]] = []
        self._strategy = strategy
        self._variables = list(variables)
        self._pieces = pieces
        self._devices = devices
        self._looped: int | None = None  # Where a loop is.
        self._referred: int | None = None

    @contextlib.contextmanager
    def of(self, optimizer: Any) -> Iterator[list[Any]]:
        """Return a scope to build in, and a list to build with."""
        positions = {
            variable_key(optimizer, variable): position
            for position, variable in enumerate(self._variables)
        }
        add = getattr(optimizer, _ADD)

        def add_from(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
            outer = self._referred
            key = variable_key(optimizer, reference_variable)
            self._referred = positions.get(key, outer)
            try:
                return add(reference_variable, *args, **kwargs)
            finally:
                self._referred = outer

        # Before optimizers that create their state on the host themselves.
        scope = creator_scope(self._create, priority=200)
        with scope, replaced([(optimizer, _ADD, add_from)]):
            yield _Watched(self._variables, self._note)

    def _note(self, position: int | None) -> None:
        self._looped = position

    def _create(self, next_creator: Callable, **kwargs: Any) -> Any:
        name = kwargs.get("name") or "slot"
        if name.endswith("_gradient_accumulator"):
            return next_creator(**kwargs)
        initial = kwargs["initial_value"]
        value = initial() if callable(initial) else initial
        value = tf.convert_to_tensor(value, kwargs["dtype"])
        _check_dtype(name, value.dtype)
        position = self._looped if self._referred is None else self._referred
        if position is None:
            self._check_shape(name, value.shape)
        pieces = [p for p in self._pieces if p.position == position]
        are_whole = all(piece.is_whole for piece in pieces)
        if position is None or not (
            are_whole or value.shape == self._variables[position].shape
        ):
            variable = next_creator(**kwargs)
            self.shared.append((variable, position))
            return variable
        held: list[Rows | None] = [None] * len(self._devices)
        first = replicas_of(self._strategy).worker * len(held)
        for piece in pieces:
            if 0 <= piece.owner - first < len(held):
                held[piece.owner - first] = piece.rows
        variable = owned_variable(
            self._strategy, self._devices, held, value, name
        )
        self.owned += [(variable, piece) for piece in pieces]
        return variable

    def _check_shape(self, name: str, shape: tf.TensorShape) -> None:
        """Refuse what looks as if it belonged to a variable, but to which?"""
        if shape.rank and any(shape == v.shape for v in self._variables):
            raise ValueError(
                "State of a variable must be created from it. Received: "
                f"{name} of shape {tuple(shape)}, which a variable has, too, "
                "outside of a loop over the variables. Create it by "
                "`self.add_variable_from_reference(variable, name)`, or use "
                "the inner optimizer alone."
            )


def _check_dtype(name: str, dtype: tf.DType) -> None:
    """Refuse what replicas cannot send."""
    if not (dtype.is_floating or dtype in (tf.int32, tf.int64)):
        raise ValueError(
            "State must be of a floating dtype, int32 or int64. Received: "
            f"{name} of dtype {dtype.name}. Create it with another dtype, or "
            "use the inner optimizer alone."
        )


class _Watched(list):
    """A list that tells at which of its elements a loop is."""

    def __init__(
        self,
        elements: Sequence[Any],
        note: Callable[[int | None], None],
    ) -> None:
        super().__init__(elements)
        self._note = note

    def __iter__(self) -> Iterator[Any]:
        try:
            for position, element in enumerate(super().__iter__()):
                self._note(position)
                yield element
        finally:
            self._note(None)
