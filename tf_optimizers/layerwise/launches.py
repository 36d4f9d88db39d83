"""Chooses the variables that a GPU steps in one launch.

A launch takes as long as stepping a few million parameters, so small variables
share one. Variables in a launch have the same shape, so that a model needs few
kernels.
"""

import collections
from collections.abc import Sequence
from typing import Any

# Limits on the variables in a launch and, if there are several, on their
# elements. Larger launches would save little time, and need all their gradients
# in memory at the same time.
MOST = 32
ELEMENTS = 1 << 24


def launches(
    variables: Sequence[int],
    kernels: Sequence[tuple[Any, ...]],
) -> list[list[int]]:
    """Return the positions in the lists, grouped by launch.

    If a variable occurs several times, each time is in a later launch.

    Args:
        variables: The index of each variable.
        kernels: A key for the kernel of each variable, a tuple that begins with
            the shape.
    """
    groups: dict[Any, list[int]] = {}
    times: collections.Counter = collections.Counter()
    for i, (variable, kernel) in enumerate(
        zip(variables, kernels, strict=True)
    ):
        groups.setdefault((kernel, times[variable]), []).append(i)
        times[variable] += 1
    found = []
    for (kernel, _), positions in groups.items():
        size = max(1, kernel[0].num_elements())
        count = max(1, min(MOST, ELEMENTS // size))
        found += [
            positions[i : i + count] for i in range(0, len(positions), count)
        ]
    return found
