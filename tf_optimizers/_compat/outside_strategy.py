"""Runs a Keras optimizer on one replica, as without a strategy."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from tf_optimizers._compat.keras import path_of

# An object, the name of one of its attributes, and a value.
Attribute = tuple[Any, str, Any]


@contextlib.contextmanager
def outside_strategy(
    optimizers: Sequence[Any],
    variables: Iterable[tuple[keras.Variable, tf.Variable]],
) -> Iterator[None]:
    """Act as if there were no strategy, inside of a replica.

    Args:
        optimizers: Keras optimizers, which remember their strategy.
        variables: Pairs of a Keras variable and its component on this replica,
            which replaces it.
    """
    # TensorFlow keeps the current strategy on this stack, and has no public
    # way to leave it temporarily.
    mode = distribute_lib._get_default_replica_mode()
    distribute_lib._push_per_thread_mode(mode)
    try:
        # Keras passes variables to the strategy that an optimizer remembers,
        # and a strategy does not accept single components.
        here = tf.distribute.get_strategy()
        with replaced(
            [
                *((o, "_distribution_strategy", here) for o in optimizers),
                *((v, "_value", component) for v, component in variables),
            ]
        ):
            yield
    finally:
        distribute_lib._pop_per_thread_mode()


def unconstrained(variables: Sequence[Any]) -> list[Attribute]:
    """Return the attributes that switch constraints off.

    Of variables of Keras, or of TensorFlow, but not of a strategy's.
    """
    # `apply` reads the constraint of each variable, and has no argument for it.
    return [(variable, "_constraint", None) for variable in variables]


def named_like(variable: keras.Variable, other: Any) -> list[Attribute]:
    """Return the attributes that give a variable another's name and path."""
    # Keras sets both when a variable is created, and has no setter.
    return [
        (variable, "_name", other.name),
        (variable, "_path", path_of(other)),
    ]


@contextlib.contextmanager
def replaced(attributes: Iterable[Attribute]) -> Iterator[None]:
    """Replace the values of attributes temporarily."""
    with contextlib.ExitStack() as undo:
        for owner, name, value in attributes:
            # Not `setattr`: Keras tracks what is assigned to an optimizer.
            undo.callback(object.__setattr__, owner, name, vars(owner)[name])
            object.__setattr__(owner, name, value)
        yield
