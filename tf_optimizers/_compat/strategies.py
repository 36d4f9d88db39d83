"""Moves optimizers and variables into a strategy, or out of it.

An optimizer, its step count and its learning rate belong to the strategy whose
scope was active when the optimizer was created. If no scope was active, the
step count is a plain variable, which every replica would increment.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from tf_optimizers._compat import backend_variable
from tf_optimizers._compat.keras_internals import path_of, strategy_of
from tf_optimizers._compat.patches import hook


def adopt(optimizer: Any, variables: Sequence[Any]) -> None:
    """Move an optimizer without a strategy into the current strategy.

    If no strategy is current, the optimizer moves into the strategy of the
    variables. Afterwards, it behaves as if it had been created in that
    strategy's scope. An optimizer that already has a strategy is not changed.
    """
    strategy = tf.distribute.get_strategy()
    if not tf.distribute.has_strategy():
        strategy = maker_of(variables) or strategy
    if strategy is _default_strategy() or is_adopted(optimizer):
        return
    # Keras has no setter. The change is safe, since an optimizer does not use
    # its strategy before `build`.
    optimizer._distribution_strategy = strategy
    # Use the `variables` of the base class, which omit those of an inner
    # optimizer. The inner optimizer is moved separately.
    bring_in(strategy, keras.optimizers.Optimizer.variables.fget(optimizer))


def is_adopted(optimizer: Any) -> bool:
    """Return whether an optimizer belongs to a strategy."""
    return strategy_of(optimizer) is not _default_strategy()


def bring_in(
    strategy: tf.distribute.Strategy, variables: Iterable[keras.Variable]
) -> None:
    """Move Keras variables into a strategy, and keep their values."""
    outside = made_outside(strategy, variables)
    with tf.init_scope(), _scope(strategy):
        for variable in outside:
            # Replace only the TensorFlow variable inside, so that references to
            # the Keras variable stay valid. Keras has no public way to do this.
            variable._initialize(variable.numpy())


_OUTSIDE = (
    "`apply` must run in `strategy.run`. Received: a call outside of "
    "`strategy.run`. Pass `strategy.run` a function that computes gradients "
    "and calls `apply`, or use `fit` or `train_on_batch`."
)


def check_in_run(strategy: tf.distribute.Strategy, built: bool = True) -> None:
    """Raise if a call to `apply` is outside of `strategy.run`.

    With one replica, a call outside of any scope is an error only if it builds
    the optimizer.
    """
    context = tf.distribute.get_replica_context()
    may_differ = built and strategy.num_replicas_in_sync == 1
    if context is None or not (may_differ or context.strategy is strategy):
        raise RuntimeError(_OUTSIDE)


def build_together(optimizer: Any, variables: Sequence[Any]) -> None:
    """Build an optimizer in a step, for all replicas at once."""
    maker = maker_of(variables) or tf.distribute.get_strategy()
    check_in_run(maker, built=False)
    call_for_all(lambda: optimizer.build(variables))


def call_for_all(build: Callable[[], None]) -> None:
    """Call a function that builds optimizers, once for all replicas of a step.

    If replicas called the function themselves, its assignments would change
    only the first replica's variables.
    """

    def call(_: tf.distribute.Strategy) -> None:
        # Leave any `tf.function` that is being traced: inside it, replicas
        # would get variables that are never initialized.
        with tf.init_scope():
            build()

    tf.distribute.get_replica_context().merge_call(call)


def made_outside(
    strategy: tf.distribute.Strategy, variables: Iterable[Any]
) -> list[Any]:
    """Return the variables that were created outside of a strategy's scope."""
    in_scope = strategy.extended.variable_created_in_scope
    return [v for v in variables if not in_scope(backend_variable(v))]


@functools.cache
def adopt_optimizers_of_keras(
    is_for: Callable[[tf.distribute.Strategy], bool],
    check: Callable[[tf.distribute.Strategy, Sequence[Any]], None],
) -> None:
    """Permanently make `build` move Keras optimizers into the strategy.

    Keras optimizers call the `build` of their base class before they add a
    variable for each weight, so only that method is replaced.

    Args:
        is_for: Called with the current strategy or, outside of any scope, with
            the optimizer's strategy. Returns whether to move optimizers into
            that strategy.
        check: Called with the strategy and the variables, before the optimizer
            is moved.
    """

    def build(
        original: Callable, optimizer: Any, variables: Sequence[Any]
    ) -> None:
        strategy = tf.distribute.get_strategy()
        if strategy is _default_strategy():
            # Outside of any scope, the variables must fit the optimizer's
            # strategy.
            strategy = strategy_of(optimizer)
        if is_for(strategy):
            check(strategy, variables)
            adopt(optimizer, variables)
        original(optimizer, variables)

    hook("Optimizer.build", build)


def maker_of(variables: Sequence[Any]) -> tf.distribute.Strategy | None:
    """Return the strategy that created the first variable, or None.

    Only strategies that store a copy of a variable on each replica are found.
    """
    value = backend_variable(variables[0]) if variables else None
    if isinstance(value, tf.distribute.DistributedValues):
        return value.distribute_strategy
    return None


def _default_strategy() -> tf.distribute.Strategy:
    """Return TensorFlow's default strategy, which has no public name."""
    return distribute_lib._get_default_replica_mode().strategy


def _scope(
    strategy: tf.distribute.Strategy,
) -> contextlib.AbstractContextManager:
    is_inside = tf.distribute.get_strategy() is strategy
    return contextlib.nullcontext() if is_inside else strategy.scope()


# An object, the name of one of its attributes, and the attribute's value.
Attribute = tuple[Any, str, Any]


@contextlib.contextmanager
def outside_strategy(
    optimizers: Sequence[Any],
    variables: Iterable[tuple[keras.Variable, tf.Variable]],
) -> Iterator[None]:
    """Run the code in this context as if there were no strategy.

    Args:
        optimizers: Keras optimizers that also leave the strategy.
        variables: Pairs of a Keras variable and its component on this replica.
            The component temporarily replaces the variable's value.
    """
    # TensorFlow keeps the current strategy on a stack, and has no public way to
    # leave a strategy temporarily.
    mode = distribute_lib._get_default_replica_mode()
    distribute_lib._push_per_thread_mode(mode)
    try:
        # Keras passes variables to the optimizer's strategy. The original
        # strategy would not accept single components.
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
    """Return the attributes for `replaced` that disable constraints.

    `variables` may be those of Keras, TensorFlow or a strategy.
    """
    # `apply` always reads each variable's constraint. A strategy's variable
    # returns the constraint of its first component.
    return [
        (component, "_constraint", None)
        for variable in variables
        for component in getattr(variable, "values", [variable])
    ]


def at_rate(optimizer: Any, rate: tf.Tensor) -> Attribute:
    """Return the attribute for `replaced` that changes the learning rate."""
    # The public setter rejects a rate if the optimizer has a schedule.
    return optimizer, "_learning_rate", rate


def named_like(variable: keras.Variable, other: Any) -> list[Attribute]:
    """Return the attributes for `replaced` that copy the name of `other`."""
    # Keras has no setters for a variable's name and path.
    return [
        (variable, "_name", other.name),
        (variable, "_path", path_of(other)),
    ]


@contextlib.contextmanager
def replaced(attributes: Iterable[Attribute]) -> Iterator[None]:
    """Replace the values of attributes; restore them after this context."""
    with contextlib.ExitStack() as undo:
        for owner, name, value in attributes:
            # Do not use `setattr`: Keras would track the value.
            if name in vars(owner):
                before = vars(owner)[name]
                undo.callback(object.__setattr__, owner, name, before)
            else:
                undo.callback(object.__delattr__, owner, name)
            object.__setattr__(owner, name, value)
        yield
