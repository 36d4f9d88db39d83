"""Optimizers under which workers have weights of their own for some steps."""

from collections.abc import Iterator
from typing import Any


def optimizers_with_local_steps(optimizer: Any) -> Iterator[Any]:
    """Yield each `SparseLoCo` of several local steps, inside of others too.

    It has `is_synchronized`, and `synchronize`.
    """
    if getattr(optimizer, "sync_every", 1) > 1:
        yield optimizer
        return
    inner = getattr(optimizer, "inner_optimizer", None)
    parts = [] if inner is None else [inner]
    for part in [*parts, *getattr(optimizer, "optimizers", [])]:
        yield from optimizers_with_local_steps(part)


def is_synchronized(optimizer: Any) -> bool:
    """Tell whether an optimizer keeps weights equal on all replicas now."""
    return all(
        each.is_synchronized for each in optimizers_with_local_steps(optimizer)
    )
