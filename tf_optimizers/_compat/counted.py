"""Private names of TensorFlow's values, to pass on how many rows a batch has.

They are kept apart, so that the optimizers do not need these modules.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, values


class Rows(NamedTuple):
    """How many rows of a batch replicas have; scalars of int32.

    A replica whose part is empty holds a row all the same, since few layers
    take none. It counts for nothing, and is not counted here.

    Attributes:
        total: Of all replicas.
        own: Of each replica of this worker, by its local rank.
    """

    total: tf.Tensor
    own: tuple[tf.Tensor, ...]


class Parts(values.PerReplica):
    """Each replica's part of what has been drawn, of a type that all share.

    Parts themselves may say more, such as that this one has two rows. A step
    that were traced for that would not be the one of a replica with one row.
    """

    def __init__(self, parts: Any, spec: tf.TypeSpec | None = None) -> None:
        super().__init__(parts)
        self._spec = spec

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return self._spec or PartsSpec(*self._own_specs())

    def _own_specs(self) -> list[tf.TypeSpec]:
        return [tf.type_spec_from_value(part) for part in self.values]


class PartsSpec(values.PerReplicaSpec):
    """The type of `Parts`."""

    value_type = property(lambda self: Parts)

    def _from_components(self, components: Any) -> Parts:
        return Parts(components, self)


class Counted(Parts):
    """Parts of a batch, and how many rows there are.

    `strategy.run` hands each replica its own part, and there is no public way
    to tell it anything about the whole.
    """

    def __init__(
        self, parts: Any, rows: Rows, spec: tf.TypeSpec | None = None
    ) -> None:
        super().__init__(parts, spec)
        self.rows = rows

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return self._spec or CountedSpec(*self._own_specs())


class CountedSpec(values.PerReplicaSpec):
    """The type of a `Counted`."""

    value_type = property(lambda self: Counted)

    @property
    def _component_specs(self) -> Any:
        parts = super()._component_specs
        return (*parts, *[tf.TensorSpec([], tf.int32)] * (1 + len(parts)))

    def _to_components(self, value: Counted) -> Any:
        total, own = value.rows
        return (*super()._to_components(value), total, *own)

    def _from_components(self, components: Any) -> Counted:
        count = len(components) // 2
        parts, (total, *own) = components[:count], components[count:]
        return Counted(parts, Rows(total, tuple(own)), self)


def with_rows(element: Any, rows: Rows, spec: Any = None) -> Any:
    """Return a batch whose first tensor says how many rows there are.

    Args:
        element: Each replica's part.
        rows: Of these.
        spec: The type of the batch, None if it is that of these parts.
    """
    leaves = tf.nest.flatten(element)
    specs = [None] * len(leaves) if spec is None else tf.nest.flatten(spec)
    pairs = zip(leaves[1:], specs[1:], strict=True)
    return tf.nest.pack_sequence_as(
        element,
        [
            *(Counted(leaf.values, rows, specs[0]) for leaf in leaves[:1]),
            *(Parts(leaf.values, spec) for leaf, spec in pairs),
        ],
    )


def spec_with_rows(spec: Any) -> Any:
    """Return the specification of such batches: functions may ask for it."""
    leaves = tf.nest.flatten(spec)
    found = [
        (PartsSpec if i else CountedSpec)(*leaf._value_specs)
        for i, leaf in enumerate(leaves)
    ]
    return tf.nest.pack_sequence_as(spec, found)


def regroup(parts: Sequence[Any], rows: Rows) -> Any:
    """Return a batch of which each replica of this worker has a part."""
    return with_rows(distribute_utils.regroup(parts, always_wrap=True), rows)


def rows_of(arguments: Any) -> Rows | None:
    """Return the rows of the batch among the arguments, None without one."""
    counted = [
        leaf for leaf in tf.nest.flatten(arguments) if isinstance(leaf, Counted)
    ]
    return counted[0].rows if counted else None
