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
    """Return whether the function being traced will be compiled by XLA."""
    # TensorFlow has no public function for this.
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def eager_context() -> Any:
    """Return TensorFlow's eager context, which holds devices and functions.

    The object has no public name. A test can replace the object to start
    TensorFlow with other devices.
    """
    return context.context()


def add_to_graphs(name: str, value: Any) -> None:
    """Append a value to the attribute `name` of all graphs being traced.

    The attribute is a list. The value is kept until the function being traced,
    and all functions that contain this function, have been deleted.
    """
    # There is no public way to find the graphs that contain a graph.
    graph = tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph"):
        values = [*getattr(graph, name, []), value]
        object.__setattr__(graph, name, values)
        graph = graph.outer_graph


def convert(function: Callable) -> Callable:
    """Convert a function with AutoGraph, if AutoGraph is enabled here.

    TensorFlow's strategies convert only the function that they call on
    replicas. A wrapper around the user's function must convert the user's
    function itself.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(
        function, autograph.control_status_ctx(), convert_by_default=False
    )


def plain_variable(initial_value: Any, **kwargs: Any) -> tf.Variable:
    """Create a single variable, even in the scope of a strategy.

    By default, the variable is not trainable.
    """
    # `tf.Variable` would let the strategy create one variable per replica. The
    # class of a single variable has no public name.
    options = {"trainable": False} | kwargs
    return resource_variable_ops.ResourceVariable(initial_value, **options)


def temporary_variable(
    value: tf.Tensor, shape: Sequence[int | None] | None = None
) -> tf.Tensor:
    """Return the handle of a new variable; both are deleted together.

    A kernel can update the value in place if no other tensor shares its memory.
    `shape` is the shape of later values, by default that of `value`.
    """
    handle = tf.raw_ops.VarHandleOp(
        dtype=value.dtype,
        shape=value.shape if shape is None else shape,
        # No public function returns a unique name.
        shared_name=context.anonymous_name(),
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return handle


def call_across_replicas(function: Callable, *args: Any) -> Any:
    """Call `function(strategy, *args)` in a context that can update variables.

    Strategies with merge calls, such as `MirroredStrategy`, update variables in
    cross-replica context. Other strategies update them in replica context.
    There is no public way to distinguish the two kinds.
    """
    if tf.distribute.in_cross_replica_context():
        return function(tf.distribute.get_strategy(), *args)
    merge_call = tf.__internal__.distribute.interim.maybe_merge_call
    return merge_call(function, tf.distribute.get_strategy(), *args)


def effects_of(function: Callable[[], object]) -> list[tf.Operation]:
    """Call a function; return its stateful operations, except reads.

    Examples are assignments, collectives and assertions. In eager mode, the
    operations have already run, and the list is empty.
    """
    if tf.executing_eagerly():
        function()
        return []
    graph = tf.compat.v1.get_default_graph()
    start = len(graph.get_operations())
    function()
    return [
        op
        for op in graph.get_operations()[start:]
        if op.op_def.is_stateful and op.type != "ReadVariableOp"
    ]


def update_each(
    variables: Sequence[tf.Variable], function: Callable, *args: Sequence[Any]
) -> None:
    """Call `function(component, *values)` for each component of each variable.

    Args:
        variables: Variables of the current strategy.
        function: Called on the component's device.
        *args: One sequence for each further argument of `function`. A sequence
            has this replica's tensor for each variable.
    """

    def placed(component: tf.Variable, *values: Any) -> None:
        # Without a strategy, TensorFlow would use the default device.
        with tf.device(component.device):
            function(component, *values)

    def update(strategy: Any, *args: Any) -> None:
        # Inside `extended.update`, every variable of the strategy refers to its
        # component on the device, so a custom `update_step` may also assign to
        # other variables.
        for variable, *values in zip(variables, *args, strict=True):
            strategy.extended.update(variable, placed, args=values, group=False)

    call_across_replicas(update, *args)


def update_by_device(
    variables: Sequence[tf.Variable], function: Callable, *args: Sequence[Any]
) -> None:
    """Call `function(rows)` once on each device.

    Args:
        variables: Variables of the current strategy.
        function: Called with a list of tuples `(component, *values)`, one for
            each component on the device.
        *args: See `update_each`.
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
    """Call one of several functions with a replica's gradients.

    Each function may reduce over replicas and update variables. Under
    strategies with merge calls, neither is possible inside a replica's
    `tf.switch_case`, so a single `tf.switch_case` surrounds all replicas.
    """

    def switch(index: tf.Tensor, call: Callable) -> None:
        def branch(function: Callable) -> Callable:
            # All branches must return a value of the same type.
            return lambda: (call(function), tf.constant(0))[1]

        tf.switch_case(tf.cast(index, tf.int32), list(map(branch, functions)))

    if len(functions) == 1:
        functions[0](gradients)
        return

    def copied(function: Callable, gradients: list[Gradient]) -> Any:
        # `tf.identity` copies the gradients into the branch's graph and to the
        # replica's device, where a reduction needs them.
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
    """A variable of zeros that takes no memory until other values are assigned.

    A checkpoint saves its zeros, and restoring them takes no memory either.
    Call `allocate` before an operation uses the variable's handle.
    """

    def has_value(self) -> tf.Tensor:
        """Return whether the variable has a value that takes memory."""
        return tf.raw_ops.VarIsInitializedOp(resource=self.handle)

    def allocate(self) -> None:
        """Allocate memory, so that operations can use the variable's handle."""
        if not self.has_value():
            with tf.device(self.device):
                super().assign(tf.zeros(self.shape, self.dtype))

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """Return True, so that checkpoints save the variable."""
        return tf.constant(True, name=name)

    def assign(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Assign a value; zeros allocate no memory."""
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
        # All reads call this method, except those of kernels, which read from
        # the handle.
        read = super()._read_variable_op

        def zeros() -> tf.Tensor:
            with tf.device(self.device):
                return tf.zeros(self.shape, self.dtype)

        return tf.cond(self.has_value(), lambda: read(no_copy), zeros)

    def _restore_from_tensors(self, restored_tensors: dict) -> Any:
        # TensorFlow's method writes to the handle, and does not call `assign`.
        (value,) = restored_tensors.values()
        with tf.device(self.device):
            return self.assign(tf.identity(value), read_value=False)


@contextlib.contextmanager
def lazy_zeros(shape: Sequence[int]) -> Iterator[None]:
    """In this context, create variables as `LazyZeros` of the given shape.

    Initial values are ignored. A strategy still creates one component for each
    replica.
    """

    def create(next_creator: Callable, **kwargs: Any) -> tf.Variable:
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
    """In this context, create the components of all replicas on one device."""

    def create(next_creator: Callable, **kwargs: Any) -> tf.Variable:
        with tf.device(device):
            return next_creator(**kwargs)

    with creator_scope(create, priority=80):
        yield


def creator_scope(
    create: Callable, priority: int
) -> contextlib.AbstractContextManager:
    """Return a scope in which `create` creates variables.

    Scopes are called from the highest priority to the lowest. A strategy's
    scope (100) calls the next scope once per replica. The scope of
    `tf.function` (50) calls no other scope. So with a priority between 50 and
    100, `create` is called once per replica. With a priority above 100,
    `create` is called once for all replicas.

    The public `tf.variable_creator_scope` has no argument for the priority.
    """
    graph = tf.compat.v1.get_default_graph()
    return graph._variable_creator_scope(create, priority=priority)
