"""The optimizers of a model, and those that leave workers weights of their own.

`SparseLoCo` of several local steps does.
"""

from collections.abc import Iterator
from typing import Any

import keras


def optimizers_of(model: keras.Model) -> dict[str, Any]:
    """Return the optimizers among a model's attributes, by name.

    The first is that of `compile`, if there is one. Others, also in a list or
    dict, are used in a `train_step`, as in that of a GAN.
    """
    compiled = getattr(model, "optimizer", None)
    found = {} if compiled is None else {"optimizer": compiled}
    for attribute, value in vars(model).items():
        for name, each in _parts(attribute, value):
            is_new = all(each is not other for other in found.values())
            if isinstance(each, keras.optimizers.Optimizer) and is_new:
                found[name] = each
    return found


def kind_of(optimizer: Any) -> str:
    """Return the class of an optimizer, and in brackets those it wraps."""
    name, parts = type(optimizer).__name__, _wrapped_by(optimizer)
    return f"{name}({', '.join(map(kind_of, parts))})" if parts else name


def steppers(model: keras.Model) -> list[Any]:
    """Return each `SparseLoCo` of a model, inside of other optimizers too.

    It has `sync_every`, `is_synchronized`, and `synchronize`.
    """
    return [
        stepper
        for optimizer in optimizers_of(model).values()
        for stepper in _steppers_in(optimizer)
    ]


def local_steppers(model: keras.Model) -> list[Any]:
    """Return each `SparseLoCo` of several local steps."""
    return [each for each in steppers(model) if each.sync_every > 1]


def has_common_weights(model: keras.Model) -> bool:
    """Tell whether a model's weights are equal on all replicas now."""
    return all(each.is_synchronized for each in local_steppers(model))


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value, or those in a list or dict, with their names."""
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{i}]", each) for i, each in enumerate(value))
    else:
        yield name, value


def _steppers_in(optimizer: Any) -> Iterator[Any]:
    if hasattr(optimizer, "sync_every"):
        yield optimizer
        return
    for part in _wrapped_by(optimizer):
        yield from _steppers_in(part)


def _wrapped_by(optimizer: Any) -> list[Any]:
    """Return the optimizers that one delegates to."""
    inner = getattr(optimizer, "inner_optimizer", None)
    parts = [] if inner is None else [inner]
    return [*parts, *getattr(optimizer, "optimizers", [])]
