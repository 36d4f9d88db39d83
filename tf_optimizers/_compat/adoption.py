"""Adopts what was made outside of a strategy's scope, and is used under it.

An optimizer remembers the strategy in whose scope it was made, and has counted
and set its rate in variables of it. Outside of any scope, these are plain
variables of the process: every replica would count its own steps into them.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from tf_optimizers._compat.keras import strategy_of
from tf_optimizers._compat.patches import replace


def adopt(optimizer: Any, variables: Sequence[Any]) -> None:
    """Make an optimizer of no strategy one of the strategy of some variables.

    It is then as if it had been made in the scope. One that was made under
    another strategy stays there.
    """
    strategy = _strategy_of(variables)
    if strategy is _none() or strategy_of(optimizer) is not _none():
        return
    # Keras has no setter. Nothing has asked for it yet: `build` comes first.
    optimizer._distribution_strategy = strategy
    # Its own; those of an optimizer inside are adopted with that.
    bring_in(strategy, keras.optimizers.Optimizer.variables.fget(optimizer))


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


@functools.cache
def adopt_optimizers_of_keras(
    is_for: Callable[[tf.distribute.Strategy], bool],
) -> None:
    """Let Keras's optimizers be adopted when they are built, from now on.

    All of them call the method of their base class before they add variables
    of their own. `is_for` tells for which strategies.
    """

    def adopting(build: Callable) -> Callable:
        @functools.wraps(build)
        def adopt_and_build(optimizer: Any, variables: Sequence[Any]) -> None:
            if is_for(_strategy_of(variables)):
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
