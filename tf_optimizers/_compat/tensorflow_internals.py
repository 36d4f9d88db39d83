"""Wraps private names of TensorFlow for replicas, variables and graphs."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
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


# What no other variable is called; TensorFlow deletes a resource of this name
# with its last handle. There is no public way to ask for either.
anonymous_name = context.anonymous_name


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


def temporary_variable(value: tf.Tensor) -> tf.Tensor:
    """Return the handle of a variable that holds `value`, and lasts as long.

    A kernel can replace the value in the memory that it is in, if nothing else
    still refers to that.
    """
    handle = tf.raw_ops.VarHandleOp(
        dtype=value.dtype,
        shape=value.shape,
        shared_name=anonymous_name(),
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return handle


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

    def on_its_device(component: tf.Variable, *values: Any) -> None:
        # Without a strategy, TensorFlow calls it on the default device.
        with tf.device(component.device):
            function(component, *values)

    def update(strategy: Any, *args: Any) -> None:
        for variable, *values in zip(variables, *args, strict=True):
            strategy.extended.update(
                variable, on_its_device, args=tuple(values), group=False
            )

    call_across_replicas(update, *args)


def update_by_device(
    variables: Sequence[tf.Variable], function: Callable, *args: Sequence[Any]
) -> None:
    """Call `function(rows)` once for each device, on it.

    Args:
        variables: Variables of the current strategy.
        function: Gets a list of tuples, each with a component on that device
            and its values.
        *args: As for `update_each`.
    """

    def update(_: Any, *args: Any) -> None:
        found: dict[str, list[tuple]] = {}

        def note(component: tf.Variable, *values: Any) -> None:
            found.setdefault(component.device, []).append((component, *values))

        update_each(variables, note, *args)
        for device, rows in found.items():
            with tf.device(device):
                function(rows)

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


# TensorFlow's class of variables without a value has no public name.
class LazyZeros(resource_variable_ops.UninitializedVariable):
    """A variable that reads as zeros while it has no value.

    To others it has one: they save zeros, and what they restore is kept unless
    it is zeros, too. Ops that take its handle need `allocate` before.
    """

    def has_value(self) -> tf.Tensor:
        """Tell whether there is memory behind it."""
        return tf.raw_ops.VarIsInitializedOp(resource=self.handle)

    def allocate(self) -> None:
        """Give it a value, for those who read it through its handle."""
        if not self.has_value():
            with tf.device(self.device):
                super().assign(tf.zeros(self.shape, self.dtype))

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """Tell checkpoints to save it."""
        return tf.constant(True, name=name)

    def assign(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Assign to it, unless it is zero and stays so."""
        value = tf.convert_to_tensor(value, self.dtype)
        self.shape.assert_is_compatible_with(value.shape)
        write = super().assign

        def change() -> tf.Tensor:
            write(value, use_locking, name, read_value=False)
            return tf.constant(True)

        done = tf.cond(
            self.has_value() | tf.reduce_any(value != 0),
            change,
            lambda: tf.constant(False),
        )
        if tf.executing_eagerly():
            return self if read_value else None
        with tf.control_dependencies([done]):
            return tf.identity(value) if read_value else done

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        # Whatever reads it comes here, except for kernels that are handed
        # its handle.
        read = super()._read_variable_op

        def zeros() -> tf.Tensor:
            with tf.device(self.device):
                return tf.zeros(self.shape, self.dtype)

        return tf.cond(self.has_value(), lambda: read(no_copy), zeros)

    def _restore_from_tensors(self, restored_tensors: dict) -> Any:
        # Checkpoints write to the handle in here, without `assign`.
        (value,) = restored_tensors.values()
        with tf.device(self.device):
            return self.assign(tf.identity(value), read_value=False)


@contextlib.contextmanager
def lazy_zeros(shape: Sequence[int]) -> Iterator[None]:
    """Create variables of zeros without a value, whatever they begin with.

    A strategy still makes one for each of its replicas. Graphs of TensorFlow 1,
    where variables have initializers that are run, get ordinary ones.
    """

    def create(next_creator: Callable, **kwargs: Any) -> tf.Variable:
        with tf.init_scope():
            has_initializers = not tf.executing_eagerly()
        if has_initializers:
            return next_creator(**kwargs)
        names = ("trainable", "synchronization", "aggregation", "name")
        strategy = kwargs.get("distribute_strategy")
        return LazyZeros(
            shape=shape,
            dtype=tf.as_dtype(kwargs["dtype"]),
            distribute_strategy=strategy,
            **{name: kwargs[name] for name in names},
        )

    with creator_scope(create, priority=75):
        yield


@contextlib.contextmanager
def replica_variables_on(device: str) -> Iterator[None]:
    """Create each replica's component of a variable on a device."""

    def create(next_creator: Callable, **kwargs: Any) -> tf.Variable:
        with tf.device(device):
            return next_creator(**kwargs)

    with creator_scope(create, priority=80):
        yield


def creator_scope(
    create: Callable, priority: int
) -> contextlib.AbstractContextManager:
    """Return a scope that creates variables in each replica.

    `tf.variable_creator_scope` has no priority: it would come before a
    strategy's, of 100, which calls the next for each replica. That of
    `tf.function`, of 50, creates variables itself.
    """
    graph = tf.compat.v1.get_default_graph()
    return graph._variable_creator_scope(create, priority=priority)
