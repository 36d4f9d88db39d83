"""Decides which replica owns which variable, and what each then holds."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# How much more than the mean the fullest replica may have.
_UNEVEN = 1.5


def assign_owners(sizes: Sequence[int], replicas: int) -> list[int]:
    """Return the owner of each variable: the same on all replicas.

    The largest comes first, to the replica that has least so far.
    """
    loads = [0] * replicas
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners


def loads_of(
    sizes: Sequence[int], owners: Sequence[int], replicas: int
) -> list[int]:
    """Return what each replica owns."""
    loads = [0] * replicas
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    return loads


def bytes_of(variable: Any) -> int:
    """Return what one copy of a variable takes."""
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


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
        "replicas, or make several variables of the largest.",
        stacklevel=2,
    )
