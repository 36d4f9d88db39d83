"""Variables of which a replica has some rows, and all others zeros."""

import weakref
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.ops import resource_variable_ops

from tf_optimizers._compat.tensorflow_internals import LazyZeros, plain_variable

# What indexes a tensor, to take some of its rows or all of it.
Rows: TypeAlias = slice | EllipsisType


# TensorFlow's class of variables that are reduced when read has no public
# name, and divides what it restores where it sums what it saves.
class OwnedVariable(values.SyncOnReadVariable):
    """A variable of a strategy of which no two replicas have the same rows.

    Outside of replicas, it is whole on all workers: reading it is a sum over
    replicas, which have zeros in all rows but their own, and of what is
    assigned or restored each keeps its own.

    Attributes:
        own_name: Its name, where that is not its components'.
    """

    own_name: str | None = None

    @property
    def name(self) -> str:
        """The name, as TensorFlow has it."""
        return self.own_name or super().name

    @property
    def aggregation(self) -> tf.VariableAggregation:
        """What those see who assign: that nothing is to be divided."""
        return tf.VariableAggregation.MEAN


class _Component(LazyZeros):
    """A replica's component: zeros without memory, but for its own rows."""

    def __init__(
        self, *, part: tf.Variable | None, rows: slice, **options: Any
    ) -> None:
        super().__init__(**options)
        self.part = part
        self.rows = rows

    def assign(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Assign to the rows that are here."""
        written = None
        if self.part is not None:
            value = tf.convert_to_tensor(value, self.dtype)
            written = self.part.assign(
                value[self.rows], use_locking, name, read_value=False
            )
        if tf.executing_eagerly():
            return self if read_value else None
        if read_value:
            return self.read_value()
        return tf.no_op() if written is None else written

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        with tf.device(self.device):
            if self.part is None:
                return tf.zeros(self.shape, self.dtype)
            before, after = self.rows.start, self.shape[0] - self.rows.stop
            others = [[0, 0]] * (self.shape.rank - 1)
            return tf.pad(self.part.read_value(), [[before, after], *others])


def owned_variable(
    strategy: tf.distribute.Strategy,
    devices: Sequence[str],
    rows: Sequence[Rows | None],
    value: tf.Tensor,
    name: str,
) -> OwnedVariable:
    """Return a variable of which each replica has its own rows.

    Args:
        strategy: The strategy.
        devices: Where the components are, of this process's replicas.
        rows: What each of these has, None for nothing.
        value: What the variable begins with.
        name: Its name.
    """
    # TensorFlow keeps 36 kB for each name that a variable was created with.
    options = {
        "trainable": False,
        "dtype": value.dtype,
        "name": "slot",
        "distribute_strategy": strategy,
    }
    components = []
    for device, own in zip(devices, rows, strict=True):
        with tf.device(device):
            part = None
            if own is not None:
                # A sum: a slice would keep the memory of all rows.
                part = plain_variable(value[own] + 0, **options)
            if not isinstance(own, EllipsisType):
                part = _Component(
                    part=part,
                    rows=own or slice(0),
                    shape=value.shape,
                    **options,
                )
        components.append(part)
    whole = OwnedVariable(strategy, components, tf.VariableAggregation.SUM)
    with tf.name_scope(name) as scope:
        whole.own_name = scope.removesuffix("/") + ":0"
    return whole


def part_of(component: tf.Variable) -> tf.Variable:
    """Return the rows that a replica's component of a variable has.

    Where it has none, whoever uses what is returned gets an error.
    """
    part = getattr(component, "part", component)
    return _Elsewhere() if part is None else part


def is_here(component: tf.Variable) -> bool:
    """Tell whether a replica's component of a variable has any rows."""
    return getattr(component, "part", component) is not None


class _Elsewhere:
    """State that another replica has, in a step of this one."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            "A step of a variable must use the state of that variable alone. "
            "Received: a step that uses state which belongs to another one, "
            "and which another replica has. Create the state of each variable "
            "by `self.add_variable_from_reference(variable, name)`, or use the "
            "inner optimizer without `ShardedState`."
        )

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return self.value


def array_of(component: tf.Variable) -> np.ndarray:
    """Return the value of a component; zeros of others' rows take no memory."""
    if not isinstance(component, _Component):
        return component.numpy()
    whole = np.zeros(component.shape, component.dtype.as_numpy_dtype)
    if component.part is not None:
        whole[component.rows] = component.part.numpy()
    return whole


# TensorFlow's class of variables without a value has no public name.
class Copy(resource_variable_ops.UninitializedVariable):
    """Some rows of a variable, which have memory in a step only.

    To optimizers, it is a component of the variable.
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
        # By which Keras finds what it keeps for a variable.
        self._distributed_container = weakref.ref(variable)

    def take(self, value: tf.Tensor) -> None:
        """Have a value, for a step."""
        tf.raw_ops.AssignVariableOp(
            resource=self.handle, value=value, validate_shape=False
        )

    def free(self) -> None:
        """Give the memory back."""
        # Of no known shape, or TensorFlow would compare it with the variable's.
        nothing = tf.zeros([0], self.dtype)
        self.take(tf.compat.v1.placeholder_with_default(nothing, shape=None))
