"""Creates the state of an inner optimizer on the replicas that own it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.keras_internals import variable_key
from tf_optimizers._compat.owned import OwnedVariable, RowRange, owned_variable
from tf_optimizers._compat.strategies import replaced
from tf_optimizers._compat.tensorflow_internals import creator_scope
from tf_optimizers.replicas import replicas_of
from tf_optimizers.sharding.ownership import Piece

_ADD = "add_variable_from_reference"


class Slots:
    """The state that an optimizer creates while it is built.

    State created by `add_variable_from_reference` belongs to the referenced
    variable. State created in a loop over the variables belongs to the loop's
    current variable. Only the owners of a variable store its state. If the
    variable is split, each owner stores the state of its own rows.

    State that belongs to no variable is replicated: every replica stores all of
    it. If a variable is split, state whose shape differs from the variable's is
    replicated, too. Gradient accumulators are neither owned nor replicated:
    every replica stores its own sums.

    Args:
        strategy: The strategy of the variables.
        variables: The model's variables.
        pieces: All variables, or ranges of their rows, with their owners.
        devices: The devices for the state of this process's replicas.

    Attributes:
        strategy, variables, pieces: The arguments.
        owned: Pairs of a state variable and the piece of a model's variable
            that the state belongs to.
        replicated: Pairs of a state variable and the index of the model's
            variable that the state belongs to, or None if it belongs to no
            variable.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        variables: Sequence[Any],
        pieces: Sequence[Piece],
        devices: Sequence[str],
    ) -> None:
        self.owned: list[tuple[OwnedVariable, Piece]] = []
        self.replicated: list[tuple[tf.Variable, int | None]] = []
        self.strategy = strategy
        self.variables = list(variables)
        self.pieces = pieces
        self._devices = devices
        # The index of a loop's current variable, and the index of the variable
        # that was passed to `add_variable_from_reference`.
        self._looped: int | None = None
        self._referred: int | None = None

    @contextlib.contextmanager
    def of(self, optimizer: Any) -> Iterator[list[Any]]:
        """Distribute the state of an optimizer that is built in this scope.

        Yields the variables to pass to the optimizer's `build`.
        """
        indices = {
            variable_key(optimizer, variable): index
            for index, variable in enumerate(self.variables)
        }
        add = getattr(optimizer, _ADD)

        def add_from(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
            outer = self._referred
            key = variable_key(optimizer, reference_variable)
            self._referred = indices.get(key, outer)
            try:
                return add(reference_variable, *args, **kwargs)
            finally:
                self._referred = outer

        # TensorFlow must call this creator before the creators of the strategy
        # and of `HostOptimizer`.
        scope = creator_scope(self._create, priority=200)
        with scope, replaced([(optimizer, _ADD, add_from)]):
            yield _Watched(self.variables, self._note)

    def _note(self, index: int | None) -> None:
        self._looped = index

    def _create(self, next_creator: Callable, **kwargs: Any) -> Any:
        name = kwargs.get("name") or "slot"
        if name.endswith("_gradient_accumulator"):
            return next_creator(**kwargs)
        initial = kwargs["initial_value"]
        value = initial() if callable(initial) else initial
        value = tf.convert_to_tensor(value, kwargs["dtype"])
        _check_dtype(name, value.dtype)
        index = self._looped if self._referred is None else self._referred
        if index is None:
            self._check_shape(name, value.shape)
        pieces = [p for p in self.pieces if p.index == index]
        are_whole = all(piece.is_whole for piece in pieces)
        if index is None or not (
            are_whole or value.shape == self.variables[index].shape
        ):
            variable = next_creator(**kwargs)
            self.replicated.append((variable, index))
            return variable
        held: list[RowRange | None] = [None] * len(self._devices)
        first = replicas_of(self.strategy).worker * len(held)
        for piece in pieces:
            if 0 <= piece.owner - first < len(held):
                held[piece.owner - first] = piece.rows
        variable = owned_variable(
            self.strategy, self._devices, held, value, name
        )
        self.owned += [(variable, piece) for piece in pieces]
        return variable

    def _check_shape(self, name: str, shape: tf.TensorShape) -> None:
        """Raise if state that belongs to no variable has a variable's shape.

        Scalar state is accepted.
        """
        if shape.rank and any(shape == v.shape for v in self.variables):
            raise ValueError(
                "The state of a variable must be created with a reference to "
                f"the variable. Received: {name} of shape {tuple(shape)}, the "
                "shape of a variable, but without a reference. Create the "
                "state with `self.add_variable_from_reference(variable, "
                "name)`, or use the inner optimizer without `ShardedState`."
            )


def _check_dtype(name: str, dtype: tf.DType) -> None:
    """Raise if replicas cannot exchange values of a dtype."""
    if not (dtype.is_floating or dtype in (tf.int32, tf.int64)):
        raise ValueError(
            "The state of an optimizer must have a floating-point dtype, int32 "
            f"or int64. Received: {name} of dtype {dtype.name}. Create the "
            "state with such a dtype, or use the inner optimizer without "
            "`ShardedState`."
        )


class _Watched(list):
    """A list that reports the current index of a loop over the list."""

    def __init__(
        self,
        elements: Sequence[Any],
        note: Callable[[int | None], None],
    ) -> None:
        super().__init__(elements)
        self._note = note

    def __iter__(self) -> Iterator[Any]:
        try:
            for index, element in enumerate(super().__iter__()):
                self._note(index)
                yield element
        finally:
            self._note(None)
