"""Private names of TensorFlow's values, to pass on how many rows a batch has.

They are kept apart, so that the optimizers do not need these modules.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import values


class Counted(values.PerReplica):
    """Each replica's part of a batch, and how many rows the whole batch has.

    `strategy.run` hands each replica its own part, and there is no public way
    to tell it anything about the whole.
    """

    def __init__(self, parts: Any, rows: tf.Tensor) -> None:
        super().__init__(parts)
        self.rows = rows

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return CountedSpec(*map(tf.type_spec_from_value, self.values))


class CountedSpec(values.PerReplicaSpec):
    """The type of a `Counted`."""

    value_type = property(lambda self: Counted)

    @property
    def _component_specs(self) -> Any:
        return (*super()._component_specs, tf.TensorSpec([], tf.int32))

    def _to_components(self, value: Counted) -> Any:
        return (*super()._to_components(value), value.rows)

    def _from_components(self, components: Any) -> Counted:
        *parts, rows = components
        return Counted(parts, rows)

    def is_subtype_of(self, other: Any) -> bool:
        """Tell whether a function for values of the other type takes these.

        A function whose signature is the data set's `element_spec` does.
        """
        if type(other) is values.PerReplicaSpec:
            return values.PerReplicaSpec(*self._serialize()).is_subtype_of(
                other
            )
        return super().is_subtype_of(other)


def with_rows(element: Any, rows: tf.Tensor) -> Any:
    """Return a batch whose first tensor says how many rows the batch has."""
    leaves = tf.nest.flatten(element)
    leaves[:1] = [Counted(leaf.values, rows) for leaf in leaves[:1]]
    return tf.nest.pack_sequence_as(element, leaves)


def rows_of_all(arguments: Any) -> tf.Tensor | None:
    """Return how many rows the batch among the arguments has, or None."""
    counted = [
        leaf for leaf in tf.nest.flatten(arguments) if isinstance(leaf, Counted)
    ]
    return counted[0].rows if counted else None
