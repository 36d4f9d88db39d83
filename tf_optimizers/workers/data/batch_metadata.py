"""Adds notes on the current and the next batch to a worker's data.

For example, two replicas of a worker take the elements a, b and c in turn. So
the next batch of a replica is two elements after its current batch:

    element                       a        b        c        c'       c'
    this batch: has_part, rows    1, 4     1, 4     1, 2     0, 0     0, 0
    next batch: has_part, rows    1, 2     0, 0     0, 0     0, 0     0, 0

With `is_endless`, the dataset continues with padding, c', for replicas whose
data have ended, since few layers accept a batch without rows. The padding is
the first row of c or, if the number of rows is fixed, all of c.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_optimizers.workers._compat.datasets import specs_of
from tf_optimizers.workers._compat.distribution import (
    PerReplica,
    PerReplicaSpec,
)
from tf_optimizers.workers.data.batch_splits import (
    blank,
    counts_of_rows,
    rows_of_type,
    take_rows,
)

# For functions that need no conversion by AutoGraph, which takes time.
_as_it_is = tf.autograph.experimental.do_not_convert


def note_next(
    dataset: tf.data.Dataset,
    parts_of: Callable[..., Sequence[tuple[Any, tf.Tensor]]],
    replicas: int,
    end: Sequence[int],
    is_endless: bool = False,
    may_lack: bool = False,
) -> tf.data.Dataset:
    """Return a dataset of parts, with notes on this batch and the next batch.

    The dataset reads `replicas` parts ahead.

    Args:
        dataset: A worker's dataset.
        parts_of: Called with the components of an element. Returns pairs: a
            part of the element, and the note on this part, an int32 vector. All
            parts have the same type.
        replicas: The number of replicas that take parts in turn.
        end: The note of a replica whose data have ended.
        is_endless: Whether to continue with padding forever after the last
            part.
        may_lack: Whether the last batch may have no part for some replicas.

    Returns:
        A dataset of pairs (part, notes). The notes are an int32 [1, 2, size of
        a note]: the note on this batch and the note on the next. If `may_lack`,
        they are wrapped in an `Ending`.
    """
    # Each mapped function costs time: once to be traced, then for each iterator
    # and each step. So there are only two of them.
    spec: Any = None

    @_as_it_is
    def box_parts(*element: Any) -> Any:
        nonlocal spec
        parts, notes = zip(*parts_of(*element), strict=True)
        spec = tf.nest.map_structure(tf.type_spec_from_value, parts[0])
        boxed = list(map(_box, parts)), list(map(has_rows, parts))
        columns = (*boxed, list(notes))
        return [tf.stack(c) if len(parts) > 1 else c[0] for c in columns]

    boxed = dataset.map(box_parts)
    if boxed.element_spec[0].shape.rank:
        boxed = boxed.unbatch()

    def nothing() -> Any:
        return _box(blank(spec)), tf.constant(False), tf.constant(end)

    @_as_it_is
    def unbox_first(state: Any, last: Any) -> Any:
        full, (box, has_rows, here), *others = state
        # Keep the last part that has rows, from which padding is made.
        full = tf.cond(has_rows, lambda: box, lambda: full)
        first = tf.cond(
            has_rows,
            lambda: box,
            lambda: _box(_first_row(_unbox(full, spec), spec)),
        )
        notes = tf.stack([here, last[2]])[tf.newaxis]
        notes = Ending(notes) if may_lack else notes
        return (full, *others, last), (_unbox(first, spec), notes)

    ends = tf.data.Dataset.from_tensors(nothing())
    return (
        boxed.concatenate(ends.repeat(None if is_endless else replicas))
        .scan((nothing()[0], *[nothing()] * replicas), unbox_first)
        .skip(replicas)
    )


def has_rows(element: Any) -> tf.Tensor:
    """Return whether every value of an element has rows, ignoring scalars."""
    counts = counts_of_rows(element)
    return tf.reduce_all(tf.greater(counts, 0)) if counts else tf.constant(True)


def _first_row(element: Any, spec: Any) -> Any:
    """Return the first row of each value in an element.

    A value with a fixed number of rows is returned unchanged.
    """
    return tf.nest.map_structure(
        lambda value, kind: (
            value if rows_of_type(kind) else take_rows(value, 0, 1)
        ),
        element,
        spec,
    )


def _box(element: Any) -> tf.Tensor:
    """Return one tensor that contains a copy of an element.

    The state of a `Dataset.scan` cannot be a `tf.experimental.Optional`
    (TensorFlow 2.21), but can be the variant tensor of an optional. The copy is
    necessary, since a step may write into its input tensors, which may share
    memory with the user's arrays or with memory-mapped files.
    """
    leaves = tf.nest.flatten(element, expand_composites=True)
    return tf.raw_ops.OptionalFromValue(
        components=[_copy(leaf) for leaf in leaves if leaf is not None]
    )


def _copy(tensor: tf.Tensor) -> tf.Tensor:
    # Variants cannot be copied.
    is_variant = tensor.dtype == tf.variant
    return tensor if is_variant else tf.raw_ops.DeepCopy(x=tensor)


def _unbox(box: tf.Tensor, spec: Any) -> Any:
    """Return the element that `_box` has packed into a tensor."""
    leaves = tf.nest.flatten(spec, expand_composites=True)
    specs = [leaf for leaf in leaves if isinstance(leaf, tf.TensorSpec)]
    tensors = iter(
        tf.raw_ops.OptionalGetValue(
            optional=box,
            output_types=[leaf.dtype for leaf in specs],
            output_shapes=[leaf.shape for leaf in specs],
        )
    )
    values = [
        next(tensors) if isinstance(leaf, tf.TensorSpec) else None
        for leaf in leaves
    ]
    return tf.nest.pack_sequence_as(spec, values, expand_composites=True)


class RowCounts(NamedTuple):
    """Row counts of a batch, as int32 scalars.

    A replica whose part is empty gets padding instead, which does not count. An
    element that is not a batch counts as one row.

    Attributes:
        total: The rows of all replicas.
        own: The rows of each replica of this worker, by local rank.
    """

    total: tf.Tensor
    own: tuple[tf.Tensor, ...]


class Ending(NamedTuple):
    """Marks notes if the last batch may have no part for some replicas."""

    note: tf.Tensor


class Counted(PerReplica):
    """The parts of one tensor of a batch, and the batch's numbers of rows.

    `strategy.run` gives each replica only its own part, and has no public way
    to pass information on the whole batch. Users may pass only some tensors of
    a batch, in any order. So every tensor comes with the numbers of rows.

    `spec` is the type of this object. By default, the type comes from the
    parts, and may be too specific: a step that is traced for two rows on one
    replica cannot run when this replica has one row.
    """

    def __init__(
        self, parts: Any, rows: RowCounts, spec: tf.TypeSpec | None = None
    ) -> None:
        super().__init__(parts)
        self.rows, self._spec = rows, spec

    @property
    def is_full(self) -> bool:
        """Whether every part is known to have no padding."""
        if self._spec is None or isinstance(self._spec, MaybeEmptySpec):
            return False
        return all(rows_of_type(spec) for spec in specs_of(self._spec))

    @property
    def _type_spec(self) -> tf.TypeSpec:
        specs = [tf.type_spec_from_value(part) for part in self.values]
        return self._spec or CountedSpec(*specs)


class CountedSpec(PerReplicaSpec):
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
        return Counted(parts, RowCounts(total, tuple(own)), self)


class MaybeEmptySpec(CountedSpec):
    """The type of a `Counted`. Even parts of fixed size may be padding."""


def with_rows(element: Any, rows: RowCounts, spec: Any = None) -> Any:
    """Return a batch, with its numbers of rows attached to each tensor.

    Args:
        element: A nest of `PerReplica`, each with the parts of one tensor.
        rows: The numbers of rows.
        spec: The type of the batch. None means the type of the parts.
    """
    leaves = tf.nest.flatten(element)
    if spec is None:
        found = [Counted(leaf.values, rows) for leaf in leaves]
    else:
        pairs = zip(leaves, tf.nest.flatten(spec), strict=True)
        found = [Counted(leaf.values, rows, each) for leaf, each in pairs]
    return tf.nest.pack_sequence_as(element, found)


def spec_with_rows(spec: Any) -> Any:
    """Return the type of a batch that `with_rows` returns.

    Args:
        spec: The type of the pairs (parts, notes) from which batches are made.
    """
    parts, note = spec
    kind = MaybeEmptySpec if isinstance(note, Ending) else CountedSpec
    found = [kind(*specs_of(leaf)) for leaf in tf.nest.flatten(parts)]
    return tf.nest.pack_sequence_as(parts, found)


def rows_of(arguments: Any) -> RowCounts | None:
    """Return the `RowCounts` of the first batch in a nest, or None."""
    counted = [
        leaf for leaf in tf.nest.flatten(arguments) if isinstance(leaf, Counted)
    ]
    return counted[0].rows if counted else None
