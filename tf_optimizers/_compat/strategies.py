"""Brings optimizers and variables into a strategy, or out of it.

An optimizer remembers the strategy in whose scope it was made, and has counted
and set its rate in variables of it. Outside of any scope, these are plain
variables of the process: every replica would count its own steps into them.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from tf_optimizers._compat.keras_internals import path_of, strategy_of
from tf_optimizers._compat.patches import replace


def adopt(optimizer: Any, variables: Sequence[Any]) -> None:
    """Make an optimizer of no strategy one of the strategy of some variables.

    It is then as if it had been made in the scope. One that was made under
    another strategy stays there.
    """
    strategy = _strategy_of(variables)
    if strategy is _none() or is_adopted(optimizer):
        return
    # Keras has no setter. Nothing has asked for it yet: `build` comes first.
    optimizer._distribution_strategy = strategy
    # Its own; those of an optimizer inside are adopted with that.
    bring_in(strategy, keras.optimizers.Optimizer.variables.fget(optimizer))


def is_adopted(optimizer: Any) -> bool:
    """Tell whether an optimizer belongs to a strategy."""
    return strategy_of(optimizer) is not _none()


def bring_in(
    strategy: tf.distribute.Strategy, variables: Iterable[keras.Variable]
) -> None:
    """Make variables of Keras a strategy's, with the values that they have."""
    in_scope = strategy.extended.variable_created_in_scope
    outside = [v for v in variables if not in_scope(v.value)]
    with tf.init_scope(), _scope(strategy):
        for variable in outside:
            # The variable stays what others know; what is behind it has no
            # public setter, nor has how Keras would have made it here.
            variable._initialize(variable.numpy())


def build_together(optimizer: Any, variables: Sequence[Any]) -> None:
    """Build an optimizer in a step, on all replicas.

    What its `build` assigns would otherwise change the first one's alone.
    """

    def build(_: tf.distribute.Strategy) -> None:
        # Outside of a `tf.function` that is being traced: inside it, replicas
        # would get variables that are never initialized.
        with tf.init_scope():
            optimizer.build(variables)

    tf.distribute.get_replica_context().merge_call(build)


def made_outside(
    strategy: tf.distribute.Strategy, variables: Iterable[Any]
) -> list[Any]:
    """Return the variables of which the strategy's replicas have no copies."""
    in_scope = strategy.extended.variable_created_in_scope
    return [
        variable
        for variable in variables
        if not in_scope(
            variable.value if isinstance(variable, keras.Variable) else variable
        )
    ]


@functools.cache
def adopt_optimizers_of_keras(
    is_for: Callable[[tf.distribute.Strategy], bool],
    check: Callable[[tf.distribute.Strategy, Sequence[Any]], None],
) -> None:
    """Let Keras's optimizers be adopted when a scope builds them, from now on.

    All of them call the method of their base class before they add variables
    of their own.

    Args:
        is_for: Tells for which strategies.
        check: Called before with the strategy and the variables.
    """

    def adopting(build: Callable) -> Callable:
        @functools.wraps(build)
        def adopt_and_build(optimizer: Any, variables: Sequence[Any]) -> None:
            strategy = tf.distribute.get_strategy()
            if is_for(strategy):
                check(strategy, variables)
                adopt(optimizer, variables)
            build(optimizer, variables)

        return adopt_and_build

    replace("Optimizer.build", adopting)


def _strategy_of(variables: Sequence[Any]) -> tf.distribute.Strategy:
    """Return the current strategy, or that of variables where there is none."""
    if tf.distribute.has_strategy() or not variables:
        return tf.distribute.get_strategy()
    value = variables[0]
    if isinstance(value, keras.Variable):
        value = value.value
    if not isinstance(value, tf.distribute.DistributedValues):
        return tf.distribute.get_strategy()
    return value.distribute_strategy


def _none() -> tf.distribute.Strategy:
    """Return the strategy outside of any scope; it has no public name."""
    return distribute_lib._get_default_replica_mode().strategy


def _scope(
    strategy: tf.distribute.Strategy,
) -> contextlib.AbstractContextManager:
    is_inside = tf.distribute.get_strategy() is strategy
    return contextlib.nullcontext() if is_inside else strategy.scope()


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

    Of variables of Keras, of TensorFlow, or of a strategy.
    """
    # `apply` reads the constraint of each variable, and has no argument for it.
    # Those of a strategy have that of their first component.
    return [
        (component, "_constraint", None)
        for variable in variables
        for component in _components(variable)
    ]


def _components(variable: Any) -> Sequence[Any]:
    """Return a variable of a strategy's on all devices, or the one itself."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return variable.values
    return [variable]


def at_rate(optimizer: Any, rate: tf.Tensor) -> Attribute:
    """Return the attribute that gives an optimizer a learning rate."""
    # What the public property assigns to may be a schedule.
    return optimizer, "_learning_rate", rate


def named_like(variable: keras.Variable, other: Any) -> list[Attribute]:
    """Return the attributes that give a variable another's name and path."""
    # Keras sets both when a variable is created, and has no setter.
    return [
        (variable, "_name", other.name),
        (variable, "_path", path_of(other)),
    ]


@contextlib.contextmanager
def replaced(attributes: Iterable[Attribute]) -> Iterator[None]:
    """Replace the values of attributes, or methods, temporarily."""
    with contextlib.ExitStack() as undo:
        for owner, name, value in attributes:
            # Not `setattr`: Keras tracks what is assigned to an optimizer.
            if name in vars(owner):
                before = vars(owner)[name]
                undo.callback(object.__setattr__, owner, name, before)
            else:
                undo.callback(object.__delattr__, owner, name)
            object.__setattr__(owner, name, value)
        yield
