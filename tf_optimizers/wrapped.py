"""Finds the optimizers that train a model.

One optimizer is passed to `compile`. A custom `train_step` may use more. The
search covers the attributes of the model, of its layers, of models inside the
model (as in a GAN), and of the user's own objects. If an attribute is a list, a
tuple or a dict, its elements are searched, too.
"""

import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_optimizers._compat import backend_variable, distinct
from tf_optimizers._compat.keras_internals import built_variables

# Instances of classes from these modules are not searched, except for layers,
# lists, tuples and dicts.
_LIBRARIES = sys.stdlib_module_names | {
    "keras",
    "numpy",
    "tensorflow",
    "tf_optimizers",
}
# In the user's objects, only attributes of these types are searched. A search
# of all attributes might never end.
_HOLDERS = (keras.optimizers.Optimizer, keras.layers.Layer, dict, list, tuple)


def optimizers_of(model: keras.Model) -> dict[str, Any]:
    """Return the distinct optimizers of a model, by name.

    The optimizer passed to `compile`, if any, comes first. Names are Python
    expressions such as `parts[0].optimizer`.
    """
    return {name: found for name, found, _ in _optimizers_in(model)}


def wrapped_optimizers(optimizer: Any) -> list[Any]:
    """Return an optimizer and all optimizers that it wraps, outermost first."""
    inner = map(wrapped_optimizers, _wrapped_by(optimizer))
    return [optimizer, *itertools.chain(*inner)]


def every_optimizer(model: keras.Model) -> list[Any]:
    """Return a model's distinct optimizers, including wrapped optimizers."""
    found = map(wrapped_optimizers, optimizers_of(model).values())
    return distinct(itertools.chain(*found))


def cannot_use_xla(model: keras.Model) -> bool:
    """Return whether an optimizer of a model has `_supports_jit = False`."""
    return not all(
        getattr(each, "_supports_jit", True) for each in every_optimizer(model)
    )


def is_wrapper(optimizer: Any) -> bool:
    """Return whether an optimizer wraps other optimizers."""
    return bool(_wrapped_by(optimizer))


def kind_of(optimizer: Any) -> str:
    """Return the classes of nested optimizers, such as "Wrapper(Adam)"."""
    name, inner = type(optimizer).__name__, _wrapped_by(optimizer)
    return f"{name}({', '.join(map(kind_of, inner))})" if inner else name


def with_updated_variables(
    model: keras.Model, variables: Sequence[keras.Variable]
) -> list[keras.Variable]:
    """Return `variables`, and all other variables that optimizers update.

    The other variables may have been frozen after the optimizer was built, or
    belong to layers that Keras does not track.
    """
    updated = [
        variable
        for optimizer in optimizers_of(model).values()
        for variable in built_variables(optimizer)
        if isinstance(variable, keras.Variable)
    ]
    return distinct([*variables, *updated])


def build_optimizers(model: keras.Model) -> list[str]:
    """Build a model's optimizers; return the names of those still unbuilt.

    An optimizer that was not passed to `compile` is not built here, because
    only the user knows its variables.
    """
    unbuilt = []
    for name, optimizer, owner in list(_optimizers_in(model)):
        variables = getattr(owner, "trainable_variables", None)
        if not optimizer.built and (variables or owner is model):
            with model.distribute_strategy.scope():
                optimizer.build(variables)
        if not optimizer.built:
            unbuilt.append(name)
    return unbuilt


def _optimizers_in(model: keras.Model) -> Iterator[tuple[str, Any, Any]]:
    """Yield triples (name, optimizer, owner).

    The owner is the model compiled with the optimizer, or None.
    """
    seen: set[int] = set()
    compiled = getattr(model, "optimizer", None)
    if compiled is not None:
        seen.add(id(compiled))
        yield "optimizer", compiled, model
    yield from _search("", model, None, seen)


def _search(
    name: str, value: Any, owner: Any, seen: set[int]
) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(value, (str, bytes, int, float)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, keras.optimizers.Optimizer):
        yield name, value, owner
        return
    for path, child in _children(name, value):
        is_compiled = isinstance(value, keras.Model) and (
            child is getattr(value, "optimizer", None)
        )
        yield from _search(path, child, value if is_compiled else None, seen)


def _children(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Return a pair (name, object) for each object to search in `value`."""
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]", each) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"{name}[{i}]", each) for i, each in enumerate(value)]
    if not isinstance(value, keras.layers.Layer) and not _is_user_object(value):
        return []
    # Search private attributes last. Keras lists layers in private attributes,
    # too, but an optimizer should be named after the user's attribute.
    found = sorted(vars(value).items(), key=lambda pair: pair[0][0] == "_")
    prefix = f"{name}." if name else ""
    return [
        (prefix + key, each)
        for key, each in found
        if isinstance(value, keras.layers.Layer) or isinstance(each, _HOLDERS)
    ]


def _is_user_object(value: Any) -> bool:
    """Return whether an object is an instance of a user-defined class."""
    library = type(value).__module__.partition(".")[0]
    is_instance = hasattr(value, "__dict__") and not isinstance(value, type)
    return is_instance and library not in _LIBRARIES


def _wrapped_by(optimizer: Any) -> list[Any]:
    """Return the optimizers that an optimizer wraps directly."""
    inner = getattr(optimizer, "inner_optimizer", None)
    found = [] if inner is None else [inner]
    return [*found, *getattr(optimizer, "optimizers", [])]


# Built optimizers that take local steps. The order is the same on all workers.
_local: list[weakref.ref[Any]] = []


def note_local_steps(optimizer: Any) -> None:
    """Make `local_steppers` find a built optimizer that takes local steps."""
    _local[:] = [each for each in _local if each() is not None]
    _local.append(weakref.ref(optimizer))


def sparse_locos_of(model: keras.Model) -> list[Any]:
    """Return each `SparseLoCo` of a model, even inside other optimizers."""
    every = every_optimizer(model)
    return [each for each in every if hasattr(each, "synchronize")]


def has_local_steps() -> bool:
    """Return whether any optimizer of this process takes local steps."""
    return any(each() is not None for each in _local)


def is_within_round() -> bool:
    """Return whether any optimizer of this process is within a round."""
    optimizers = [each() for each in _local]
    return any(each and not each.is_synchronized for each in optimizers)


def local_steppers(model: keras.Model) -> list[Any]:
    """Return each `SparseLoCo` that takes local steps with a model's weights.

    This includes optimizers of a model that contains `model`, and optimizers
    that belong to no model.
    """
    found = [each for each in sparse_locos_of(model) if each.sync_every > 1]
    own = _ids(model.variables)
    others = [
        each
        for each in (reference() for reference in _local)
        if each is not None and not own.isdisjoint(_ids(built_variables(each)))
    ]
    return distinct(found + others)


def only_local_steppers(model: keras.Model) -> list[Any]:
    """Return a model's `SparseLoCo` optimizers that take local steps.

    The list is empty if the model has another optimizer, even inside of a
    `MultiOptimizer`, because it may exchange values in every step. For example,
    a `LossScaleOptimizer` exchanges whether gradients overflow.
    """
    return _all_local(optimizers_of(model).values())


def _all_local(optimizers: Iterable[Any]) -> list[Any]:
    """Return the `SparseLoCo` optimizers that take local steps.

    The list is empty if any of `optimizers` exchanges values in every step.
    """
    found: list[Any] = []
    for optimizer in optimizers:
        if hasattr(optimizer, "synchronize"):
            local = [optimizer] if optimizer.sync_every > 1 else []
        elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            local = []
        else:
            local = _all_local(_wrapped_by(optimizer))
        if not local:
            return []
        found += local
    return found


class LocalRound(NamedTuple):
    """A round: local steps on each replica, followed by an exchange.

    Attributes:
        ends: bool scalar. Whether the next step is the last of the round.
        batches: The number of batches in a whole round.
        overlaps: Whether the values of a round are exchanged while the next
            round runs.
        waits: bool scalar. Whether every step waits for other workers. If so,
            `ends` is True in every step.
    """

    ends: tf.Tensor
    batches: int
    overlaps: bool = False
    waits: tf.Tensor | bool = False


def current_round(optimizers: Sequence[Any]) -> LocalRound | None:
    """Return the current round of a model's optimizers.

    Call this function outside of `strategy.run`. If the optimizers' rounds
    differ, the current round ends when the first of them ends.

    Args:
        optimizers: The result of `only_local_steppers`.

    Returns:
        None if there is no optimizer, or if an optimizer is not built.
    """
    if not optimizers or not all(each.built for each in optimizers):
        return None
    return LocalRound(
        tf.reduce_any([each.batches_left() <= 1 for each in optimizers]),
        max(
            each.sync_every * (each.gradient_accumulation_steps or 1)
            for each in optimizers
        ),
        all(each.overlap for each in optimizers),
    )


def _ids(variables: Sequence[Any]) -> set[int]:
    return {id(backend_variable(each)) for each in variables}


def has_common_weights(model: keras.Model) -> bool:
    """Return whether a model's weights are equal on all replicas now."""
    return all(each.is_synchronized for each in local_steppers(model))
