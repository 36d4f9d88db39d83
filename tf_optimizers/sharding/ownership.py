"""Chooses the replica that owns each variable, or each range of its rows."""

import dataclasses
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.keras_internals import path_of
from tf_optimizers._compat.owned import RowRange

# A replica's load is the number of bytes that it owns. A load of more than this
# factor times the mean load causes a warning. If all large variables can be
# split into equal pieces, one for each replica, no replica has such a load: a
# variable that is not split has at most half of the mean load.
_LARGEST_LOAD = 1.5
# Keras's elementwise optimizers: the update of an element depends on no other
# element.
_ELEMENTWISE = tuple(
    getattr(keras.optimizers, name)
    for name in (
        "SGD",
        "RMSprop",
        "Adam",
        "AdamW",
        "Adadelta",
        "Adagrad",
        "Adamax",
        "Nadam",
        "Ftrl",
        "Lion",
        "ScheduleFreeAdamW",
    )
    if hasattr(keras.optimizers, name)
)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A variable or some of its rows, and the replica that owns this piece."""

    index: int  # The variable's index.
    owner: int  # The replica's rank.
    ends: tuple[int, int] | None = None  # The range of rows; None for all.

    @property
    def is_whole(self) -> bool:
        """Whether the piece is the whole variable."""
        return self.ends is None

    @property
    def rows(self) -> RowRange:
        """The index that selects the piece's rows in the variable."""
        return ... if self.ends is None else slice(*self.ends)


def is_elementwise(optimizer: Any) -> bool:
    """Return whether an optimizer may update a variable's rows separately."""
    # Ignore an inherited attribute, because a subclass may update differently.
    is_set = "is_elementwise" in vars(type(optimizer)) | vars(optimizer)
    return bool(
        optimizer.is_elementwise if is_set else type(optimizer) in _ELEMENTWISE
    )


def assign_owners(
    variables: Sequence[Any], replicas: int, may_split: bool
) -> list[Piece]:
    """Cut variables into pieces, and choose an owner for each piece.

    The result is the same on all replicas. Variables are assigned from the
    largest to the smallest, each to the replica that owns the fewest bytes so
    far. If `may_split`, a variable larger than half of the mean load is split
    among all replicas or, if it has fewer rows, into single rows. No replica
    gets two pieces of one variable.
    """
    sizes = list(map(bytes_of, variables))
    large = (_LARGEST_LOAD - 1) * sum(sizes) / replicas
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
    return sorted(pieces, key=lambda piece: (piece.index, piece.ends or ()))


def loads_of(owned: Iterable[tuple[Any, Piece]], replicas: int) -> list[int]:
    """Return the number of bytes that each replica owns."""
    loads = [0] * replicas
    for variable, piece in owned:
        loads[piece.owner] += bytes_of(variable, piece)
    return loads


def bytes_of(variable: Any, piece: Piece | None = None) -> int:
    """Return the size of a variable, or of a piece of it, in bytes."""
    shape = list(variable.shape)
    if piece is not None and piece.ends is not None:
        shape[0] = piece.ends[1] - piece.ends[0]
    return math.prod(shape) * tf.as_dtype(variable.dtype).size


def warn_of_uneven(variables: Sequence[Any], loads: Sequence[int]) -> None:
    """Warn if one replica owns much more than the mean number of bytes."""
    mean = sum(loads) / len(loads)
    if max(loads) <= _LARGEST_LOAD * mean:
        return
    largest = max(variables, key=bytes_of)
    warnings.warn(
        "No replica should update more than 1.5 times as many bytes of weights "
        f"as the average replica. Received: {max(loads)} bytes for one "
        f"replica, and a mean of {mean:.0f} bytes; the largest variable is "
        f"{path_of(largest)}, with {bytes_of(largest)} bytes. Use fewer "
        "replicas, or split the largest variable into several. If the "
        "optimizer is not elementwise, you can also use one that is, such as "
        "`keras.optimizers.AdamW`: then large variables are split by rows.",
        stacklevel=2,
    )
