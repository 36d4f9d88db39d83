"""Decides which replica owns which rows, and what each then holds."""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_optimizers._compat.owned import Rows

# How much more than the mean the fullest replica may have. It never has if
# all variables can be split: those that are not are smaller than the excess.
_UNEVEN = 1.5
# Of Keras: each entry of a step depends on the entries at its place only.
_ELEMENTWISE = tuple(
    getattr(keras.optimizers, name)
    for name in (
        *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax"),
        *("Nadam", "Ftrl", "Lion", "ScheduleFreeAdamW"),
    )
    if hasattr(keras.optimizers, name)
)


class Piece(NamedTuple):
    """Some rows of a variable, or all of it, and the replica that owns them."""

    position: int  # Of the variable.
    owner: int
    ends: tuple[int, int] | None = None  # Of the rows, None for all.

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the variable, which may have no rows."""
        return self.ends is None

    @property
    def rows(self) -> Rows:
        """What indexes the variable."""
        return ... if self.ends is None else slice(*self.ends)


def is_elementwise(optimizer: Any) -> bool:
    """Tell whether an optimizer steps parts of a variable as the whole."""
    known = type(optimizer) in _ELEMENTWISE
    return bool(getattr(optimizer, "is_elementwise", known))


def share_out(
    variables: Sequence[Any], replicas: int, may_split: bool
) -> list[Piece]:
    """Return the owners of variables, or of rows: the same on all replicas.

    The largest variable comes first, to the replica that has least so far. If
    it may be split, it is if it has more than half of a replica's fair share.
    No replica gets two pieces of a variable.
    """
    sizes = list(map(bytes_of, variables))
    large = (_UNEVEN - 1) * sum(sizes) / replicas
    loads = [0] * replicas
    pieces = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        shape, parts = variables[i].shape, 1
        if may_split and sizes[i] > large and len(shape):
            parts = min(replicas, shape[0])
        emptiest = sorted(range(replicas), key=loads.__getitem__)
        for part, owner in enumerate(emptiest[:parts]):
            piece = Piece(i, owner)
            if parts > 1:
                start, end = (shape[0] * k // parts for k in (part, part + 1))
                piece = Piece(i, owner, (start, end))
            pieces.append(piece)
            loads[owner] += bytes_of(variables[i], piece)
    return sorted(pieces, key=lambda piece: (piece.position, piece.ends or ()))


def loads_of(owned: Iterable[tuple[Any, Piece]], replicas: int) -> list[int]:
    """Return the bytes that each replica owns of some variables."""
    loads = [0] * replicas
    for variable, piece in owned:
        loads[piece.owner] += bytes_of(variable, piece)
    return loads


def bytes_of(variable: Any, piece: Piece | None = None) -> int:
    """Return what one copy of a variable, or of a piece of it, takes."""
    shape = list(variable.shape)
    if piece is not None and piece.ends is not None:
        shape[0] = piece.ends[1] - piece.ends[0]
    return math.prod(shape) * tf.as_dtype(variable.dtype).size


def warn_of_uneven(variables: Sequence[Any], loads: Sequence[int]) -> None:
    """Warn if one replica has much more to hold than others."""
    mean = sum(loads) / len(loads)
    if max(loads) <= _UNEVEN * mean:
        return
    largest = max(variables, key=bytes_of)
    warnings.warn(
        "The fullest replica should own at most 1.5 times the mean. Received: "
        f"variables of {max(loads)} bytes on it, where the mean is {mean:.0f}; "
        f"the largest variable is {largest.name}, of {bytes_of(largest)}. "
        "Memory and time of a step are those of the fullest: use fewer "
        "replicas, make several variables of the largest, or use an optimizer "
        "that is elementwise, such as `keras.optimizers.AdamW`, for which "
        "large variables are split.",
        stacklevel=2,
    )
