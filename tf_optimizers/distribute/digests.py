"""Digests, by which arrays are compared bit for bit."""

import hashlib
from collections.abc import Iterable

import numpy as np


def digests(values: Iterable[np.ndarray]) -> list[str]:
    """Return the digests of the distinct values."""
    return sorted(
        {
            hashlib.blake2b(as_bytes(value).data, digest_size=16).hexdigest()
            for value in values
        }
    )


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array of any dtype, bfloat16 included."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
