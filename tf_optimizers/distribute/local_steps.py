"""Optimizers that leave workers weights of their own between two steps.

`SparseLoCo` of several local steps does.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import keras

from tf_optimizers._compat.keras import built_variables
from tf_optimizers.distribute.optimizers import optimizers_of, parts_of

_local: list[weakref.ref[Any]] = []  # In order, which all workers share.


def note_local_steps(optimizer: Any) -> None:
    """Note that an optimizer, which is built, takes several local steps."""
    _local[:] = [each for each in _local if each() is not None]
    _local.append(weakref.ref(optimizer))


def steppers(model: keras.Model) -> list[Any]:
    """Return each `SparseLoCo` of a model, inside of other optimizers too.

    It has `sync_every`, `is_synchronized`, and `synchronize`.
    """
    found = {
        id(part): part
        for optimizer in optimizers_of(model).values()
        for part in parts_of(optimizer)
        if hasattr(part, "sync_every")
    }
    return list(found.values())


def local_steppers(model: keras.Model) -> list[Any]:
    """Return each `SparseLoCo` of several local steps that moves a model.

    It may hang elsewhere: on a model that this one is a part of, or nowhere.
    """
    found = [each for each in steppers(model) if each.sync_every > 1]
    own = _ids(model.variables)
    others = [
        each
        for each in (reference() for reference in _local)
        if each is not None and not own.isdisjoint(_ids(built_variables(each)))
    ]
    return list({id(each): each for each in found + others}.values())


def _ids(variables: Sequence[Any]) -> set[int]:
    return {
        id(each.value if isinstance(each, keras.Variable) else each)
        for each in variables
    }


def has_common_weights(model: keras.Model) -> bool:
    """Tell whether a model's weights are equal on all replicas now."""
    return all(each.is_synchronized for each in local_steppers(model))
