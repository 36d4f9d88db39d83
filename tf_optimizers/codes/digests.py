"""Computes digests, so that workers can compare their arrays."""

import hashlib
from collections.abc import Iterable

import numpy as np


def digests(values: Iterable[np.ndarray]) -> list[str]:
    """Return the sorted digests of arrays, without duplicates.

    A digest covers the bytes of an array, but not its shape or dtype.
    """
    return sorted(
        {
            hashlib.blake2b(as_bytes(value).data, digest_size=16).hexdigest()
            for value in values
        }
    )


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array of numbers, even of bfloat16."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
