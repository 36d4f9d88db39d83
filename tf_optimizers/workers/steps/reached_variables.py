"""Finds `tf.Variable`s that a model or its code refers to.

Keras tracks neither these variables nor their assignments.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.keras_internals import layers_of

# Instances of these classes, and of user-defined classes, are searched.
_OWNERS = (
    keras.Layer,
    keras.Loss,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    tf.Module,
)
# Instances of these are not: their variables may differ between replicas.
_SEPARATE = (keras.Variable, keras.Metric, keras.Optimizer)
# Types of values that are skipped. User code may refer to large lists of them.
_PLAIN = {bool, bytes, float, int, str, type(None)}
_LIBRARIES = {"keras", "tensorflow", "tf_optimizers", "numpy", "builtins"}


def reached_variables(model: keras.Model) -> list[tf.Variable]:
    """Return the distinct `tf.Variable`s that a model or its code refers to.

    The search includes the attributes of the model, its layers, losses,
    regularizers, constraints, `tf.Module`s and instances of user-defined
    classes; elements of lists, tuples and dicts; and names that user-defined
    functions refer to.
    """
    found: list[tf.Variable] = []
    seen: set[int] = set()
    waiting: list[Any] = [model, *layers_of(model)]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, tf.Variable):
            found.append(value)
        else:
            inside = _values_in(value)
            waiting += [each for each in inside if type(each) not in _PLAIN]
    return found


def _values_in(value: Any) -> Iterator[Any]:
    """Yield the values that an object, a container or a function refers to."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, types.MethodType):
        yield value.__func__
    elif isinstance(value, tf.types.experimental.GenericFunction):
        yield getattr(value, "python_function", None)
    elif isinstance(value, types.FunctionType):
        if not _is_of_library(value):
            yield from _values_named_in(value)
    elif isinstance(value, type):
        if not _is_of_library(value):
            yield from vars(value).values()
    elif isinstance(value, _OWNERS) or _is_of_user(value):
        # Copy the values first, since a thread may add attributes.
        yield from [*getattr(value, "__dict__", {}).values()]
        yield from type(value).__mro__


def _values_named_in(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values of names that a function uses."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # The cell is still empty.
            yield cell.cell_contents
    for name in _global_names_in(function.__code__):
        yield function.__globals__.get(name)


def _global_names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in code, and in inner code."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _global_names_in(each)


def _is_of_user(value: Any) -> bool:
    """Return whether a value is of a user's class, but not of `_SEPARATE`."""
    return not _is_of_library(type(value)) and not isinstance(value, _SEPARATE)


def _is_of_library(value: Any) -> bool:
    return (value.__module__ or "").partition(".")[0] in _LIBRARIES
