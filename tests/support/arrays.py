"""Comparisons of lists of arrays, or of variables."""

import numpy as np
from cases import as_numpy


def assert_equal(actual, expected):
    """Check that arrays, or variables, are equal."""
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(as_numpy(a), as_numpy(b))


def assert_close(actual, expected, **tolerance):
    """Check that arrays, or variables, are close."""
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(as_numpy(a), as_numpy(b), **tolerance)
