"""Short texts that tell whether arrays are the same to the bit."""

import hashlib
from collections.abc import Iterable

import numpy as np


def digests(values: Iterable[np.ndarray]) -> list[str]:
    """Return digests of the distinct ones among values."""
    return sorted(
        {
            hashlib.blake2b(as_bytes(value).data, digest_size=16).hexdigest()
            for value in values
        }
    )


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array, also of bfloat16."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
