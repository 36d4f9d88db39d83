"""Chooses which variables a GPU steps in one launch.

A launch costs as much as stepping a few million parameters, so small variables
share one. Variables of one shape have one kernel, however many of them there
are: it has the same parts for each, which XLA compiles once.
"""

import collections
from collections.abc import Sequence
from typing import Any

# The most variables in a launch, and the most elements of several. More would
# save little, and their gradients would have to wait for each other in memory.
MOST = 32
ELEMENTS = 1 << 24


def launches(
    variables: Sequence[int],
    kernels: Sequence[tuple[Any, ...]],
) -> list[list[int]]:
    """Return positions in the lists, by the launch that steps them.

    A variable that comes again, for another gradient, is in a later launch.

    Args:
        variables: What identifies each variable.
        kernels: What identifies the kernel of each; its shape comes first.
    """
    alike: dict[Any, list[int]] = {}
    times: collections.Counter = collections.Counter()
    for i, (variable, kernel) in enumerate(
        zip(variables, kernels, strict=True)
    ):
        alike.setdefault((kernel, times[variable]), []).append(i)
        times[variable] += 1
    found = []
    for (kernel, _), positions in alike.items():
        size = max(1, kernel[0].num_elements())
        count = max(1, min(MOST, ELEMENTS // size))
        found += [
            positions[i : i + count] for i in range(0, len(positions), count)
        ]
    return found
