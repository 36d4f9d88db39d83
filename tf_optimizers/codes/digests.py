"""Computes digests of arrays, which workers compare."""

import hashlib
from collections.abc import Iterable

import numpy as np


def digests(values: Iterable[np.ndarray]) -> list[str]:
    """Return a digest of each distinct value, sorted."""
    return sorted(
        {
            hashlib.blake2b(as_bytes(value).data, digest_size=16).hexdigest()
            for value in values
        }
    )


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array of any dtype, including bfloat16."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
