"""Names what TensorFlow knows of replicas, variables and graphs, in private."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import control_flow_util, resource_variable_ops

from tf_optimizers._compat import Gradient


def in_xla() -> bool:
    """Tell whether what is being traced will be compiled by XLA."""
    # `tf.function(jit_compile=True)` opens a context that ops ask for in here
    # only; it has no public name.
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def eager_context() -> Any:
    """Return what TensorFlow keeps devices and functions in.

    Keras's tests of strategies replace it, to start with other devices. It
    has no public name.
    """
    return context.context()


def convert(function: Callable) -> Callable:
    """Return what AutoGraph makes of a function, if it is on here.

    TensorFlow's strategies do so before they call replicas. A function that
    calls the user's has to do it in their place, or it is converted itself.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(
        function, autograph.control_status_ctx(), convert_by_default=False
    )


def plain_variable(initial_value: Any, **kwargs: Any) -> tf.Variable:
    """Create one variable that no strategy in scope captures."""
    # `tf.Variable` asks the strategy, which makes one per replica. The class
    # behind it, which has no public name, does not.
    return resource_variable_ops.ResourceVariable(initial_value, **kwargs)


def call_across_replicas(function: Callable, *args: Any) -> Any:
    """Call `function(strategy, *args)` where variables can be updated.

    That is cross-replica context for strategies that merge their replicas
    (`MirroredStrategy`), and the replica itself for those that do not. Which
    of the two a strategy is has no public name.
    """
    if tf.distribute.in_cross_replica_context():
        return function(tf.distribute.get_strategy(), *args)
    return tf.__internal__.distribute.interim.maybe_merge_call(
        function, tf.distribute.get_strategy(), *args
    )


def update_each(
    variables: Sequence[tf.Variable], function: Callable, *args: Sequence[Any]
) -> None:
    """Call `function(component, *values)` for each component of each variable.

    Args:
        variables: Variables of the current strategy.
        function: Called on the component's device.
        *args: One sequence per further argument of `function`, with one
            tensor per variable: this replica's.
    """

    def update(strategy: Any, *args: Any) -> None:
        for variable, *values in zip(variables, *args, strict=True):
            strategy.extended.update(
                variable, function, args=tuple(values), group=False
            )

    call_across_replicas(update, *args)


def switch_across_replicas(
    index: Any, functions: Sequence[Callable], gradients: list[Gradient]
) -> None:
    """Run one of several functions of a replica's gradients.

    Each may reduce over replicas and update variables. A strategy that merges
    its replicas refuses both inside a `tf.switch_case` that a replica enters,
    so there it is entered once and each replica runs inside it.
    """

    def switch(index: tf.Tensor, call: Callable) -> None:
        def branch(function: Callable) -> Callable:
            # Branches must return something, and the same.
            return lambda: (call(function), tf.constant(0))[1]

        tf.switch_case(tf.cast(index, tf.int32), list(map(branch, functions)))

    if len(functions) == 1:
        functions[0](gradients)
        return

    def copied(function: Callable, gradients: list[Gradient]) -> Any:
        # Copies have the replica's device, by which values are reduced, and
        # are of the branch's graph, as all must be that is reduced at once.
        return function(list(map(tf.identity, gradients)))

    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        switch(index, lambda function: copied(function, gradients))
        return

    def merged(strategy: Any, index: Any, gradients: Any) -> None:
        def call(function: Callable) -> Any:
            return strategy.extended.call_for_each_replica(
                functools.partial(copied, function), args=(gradients,)
            )

        switch(strategy.experimental_local_results(index)[0], call)

    tf.distribute.get_replica_context().merge_call(
        merged, args=(index, gradients)
    )
