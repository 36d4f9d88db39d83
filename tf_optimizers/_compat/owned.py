"""Defines variables whose rows are owned by different replicas."""

import weakref
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.ops import resource_variable_ops

from tf_optimizers._compat.tensorflow_internals import LazyZeros, plain_variable

# An index that selects some rows of a tensor, or the whole tensor.
RowRange: TypeAlias = slice | EllipsisType


# The base class has no public name. When its variables are read, their
# components are reduced.
class OwnedVariable(values.SyncOnReadVariable):
    """A variable of a strategy whose rows are owned by different replicas.

    Outside of `strategy.run`, a read returns the whole value. It is the sum
    over replicas, where each replica's value is 0 in the rows that it does not
    own. When a value is assigned or restored, each replica stores only its own
    rows.

    Attributes:
        own_name: The variable's name, if it differs from the components' name.
    """

    own_name: str | None = None

    @property
    def name(self) -> str:
        """The `own_name` if it is set, else the components' name."""
        return self.own_name or super().name

    @property
    def aggregation(self) -> tf.VariableAggregation:
        """MEAN, so that assigned and restored values are not divided."""
        # With SUM, TensorFlow would divide values by the number of replicas.
        return tf.VariableAggregation.MEAN


class _Component(LazyZeros):
    """A replica's component of an `OwnedVariable`; stores only owned rows."""

    def __init__(
        self, *, own: tf.Variable | None, rows: slice, **options: Any
    ) -> None:
        super().__init__(**options)
        self.own = own
        self.rows = rows

    def assign(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Assign the replica's own rows of `value`, which has all rows."""
        written = None
        if self.own is not None:
            value = tf.convert_to_tensor(value, self.dtype)
            written = self.own.assign(
                value[self.rows], use_locking, name, read_value=False
            )
        if tf.executing_eagerly():
            return self if read_value else None
        if read_value:
            return self.read_value()
        return tf.no_op() if written is None else written

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        with tf.device(self.device):
            if self.own is None:
                return tf.zeros(self.shape, self.dtype)
            before, after = self.rows.start, self.shape[0] - self.rows.stop
            others = [[0, 0]] * (self.shape.rank - 1)
            return tf.pad(self.own.read_value(), [[before, after], *others])


def owned_variable(
    strategy: tf.distribute.Strategy,
    devices: Sequence[str],
    rows: Sequence[RowRange | None],
    value: tf.Tensor,
    name: str,
) -> OwnedVariable:
    """Return a variable whose rows are owned by different replicas.

    Args:
        strategy: The strategy of the variable.
        devices: The device of each replica of this process.
        rows: The rows that each replica of this process owns; None for no rows.
        value: The initial value of the whole variable.
        name: The name of the variable.
    """
    # All components have the same name, because TensorFlow keeps 36 kB for each
    # name that was ever used.
    options = {
        "trainable": False,
        "dtype": value.dtype,
        "name": "slot",
        "distribute_strategy": strategy,
    }
    components = []
    for device, owned in zip(devices, rows, strict=True):
        with tf.device(device):
            component = None
            if owned is not None:
                # `+ 0` makes a copy: a slice would keep all rows in memory.
                component = plain_variable(value[owned] + 0, **options)
            if not isinstance(owned, EllipsisType):
                component = _Component(
                    own=component,
                    rows=owned or slice(0),
                    shape=value.shape,
                    **options,
                )
        components.append(component)
    whole = OwnedVariable(strategy, components, tf.VariableAggregation.SUM)
    with tf.name_scope(name) as scope:
        whole.own_name = scope.removesuffix("/") + ":0"
    return whole


def own_rows(component: tf.Variable) -> tf.Variable:
    """Return a plain variable with the rows that a component's replica owns.

    If the replica owns no rows, return an object that raises an error on use.
    """
    own = getattr(component, "own", component)
    return _UnownedState() if own is None else own


def owns_rows(component: tf.Variable) -> bool:
    """Return whether a component's replica owns any rows of the variable."""
    return getattr(component, "own", component) is not None


class _UnownedState:
    """Replaces state that another replica owns; any use raises an error."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            "`update_step(gradient, variable, learning_rate)` must use only "
            "the state of `variable`. Received: a call that uses another "
            "variable's state, which another replica owns. Create each "
            "variable's state with `self.add_variable_from_reference(variable, "
            "name)`, or use the inner optimizer without `ShardedState`."
        )

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return self.value


def array_of(component: tf.Variable) -> np.ndarray:
    """Return a component's value, with zeros in the rows of other replicas."""
    if not isinstance(component, _Component):
        return component.numpy()
    # NumPy's zeros take no memory until they are written.
    whole = np.zeros(component.shape, component.dtype.as_numpy_dtype)
    if component.own is not None:
        whole[component.rows] = component.own.numpy()
    return whole


# TensorFlow's class of variables without a value has no public name.
class Copy(resource_variable_ops.UninitializedVariable):
    """A copy of some rows of a variable; takes memory only during a step.

    Optimizers treat the copy as a component of the variable.
    """

    def __init__(
        self, *, variable: tf.Variable, ends: tuple[int, int], device: str
    ) -> None:
        with tf.device(device):
            super().__init__(
                shape=[ends[1] - ends[0], *variable.shape[1:]],
                dtype=variable.dtype,
                name=variable.name.removesuffix(":0"),
            )
        # Keras uses this attribute to find the state of a variable.
        self._distributed_container = weakref.ref(variable)

    def take(self, value: tf.Tensor) -> None:
        """Assign a value, which takes memory until `free` is called."""
        tf.raw_ops.AssignVariableOp(
            resource=self.handle, value=value, validate_shape=False
        )

    def free(self) -> None:
        """Free the memory of the value."""
        # The placeholder hides the shape [0] from TensorFlow, which would
        # reject a shape that differs from the variable's.
        nothing = tf.zeros([0], self.dtype)
        self.take(tf.compat.v1.placeholder_with_default(nothing, shape=None))
