"""Makes variables that are zero and take no memory until they are needed."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops


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
