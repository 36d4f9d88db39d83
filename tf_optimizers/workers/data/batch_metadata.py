"""Notes the rows of each batch, and of the next, on a worker's elements.

With two replicas on a worker, which take turns, and three elements:

    element            a        b        c        c'       c'
    has one, rows      1, 4     1, 4     1, 2     0, 0     0, 0   ...
    two later          1, 2     0, 0     0, 0     0, 0     0, 0

c' is the first row of c. A worker whose data have ended goes on with it for as
long as others have some, as few layers take a batch without rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_optimizers.workers._compat.distribution import (
    PerReplica,
    PerReplicaSpec,
)
from tf_optimizers.workers._compat.distribution import regroup as regroup_values
from tf_optimizers.workers.data.batch_splits import (
    blank,
    rows_in,
    rows_of_type,
    take_rows,
)

# AutoGraph takes longer to read these functions than they take to run.
_as_it_is = tf.autograph.experimental.do_not_convert


def note_next(
    dataset: tf.data.Dataset,
    parts_of: Callable[..., Sequence[tuple[Any, tf.Tensor]]],
    replicas: int,
    end: Sequence[int],
    is_endless: bool = False,
    may_lack: bool = False,
) -> tf.data.Dataset:
    """Return parts of elements, with what their replicas have now and next.

    A part comes when the one that is `replicas` later is there, too.

    Args:
        dataset: That of a worker.
        parts_of: Called with an element; returns its parts, of one type, each
            with a note, an int32 vector.
        replicas: How many draw parts, in turn.
        end: The note on what comes after the last part.
        is_endless: Whether to go on after that with the first row of the last
            part, none of which counts.
        may_lack: Whether the last batch may lack a part.

    Returns:
        Parts, each with an int32 [1, 2, size of a note], which is in an
        `Ending` if the last batch may lack one.
    """
    # Each function that is mapped costs time, when it is traced, when an
    # iterator is made, and in each step: so there are three.
    spec: Any = None

    @_as_it_is
    def close(*element: Any) -> Any:
        nonlocal spec
        parts, notes = zip(*parts_of(*element), strict=True)
        spec = tf.nest.map_structure(tf.type_spec_from_value, parts[0])
        closed = list(map(_close, parts)), list(map(has_rows, parts))
        columns = (*closed, list(notes))
        return [tf.stack(c) if len(parts) > 1 else c[0] for c in columns]

    closed = dataset.map(close)
    if closed.element_spec[0].shape.rank:
        closed = closed.unbatch()

    def nothing() -> Any:
        return _close(blank(spec)), tf.constant(False), tf.constant(end)

    @_as_it_is
    def end_with(_: tf.Tensor) -> Any:
        return nothing()

    @_as_it_is
    def open_first(state: Any, last: Any) -> Any:
        full, (box, has_rows, here), *others = state
        # What there is to repeat a row of.
        full = tf.cond(has_rows, lambda: box, lambda: full)
        first = tf.cond(
            has_rows,
            lambda: box,
            lambda: _close(_first_row(_open(full, spec), spec)),
        )
        notes = tf.stack([here, last[2]])[tf.newaxis]
        notes = Ending(notes) if may_lack else notes
        return (full, *others, last), (_open(first, spec), notes)

    ends = tf.data.Dataset.range(1).repeat(None if is_endless else replicas)
    return (
        closed.concatenate(ends.map(end_with))
        .scan((nothing()[0], *[nothing()] * replicas), open_first)
        .skip(replicas)
    )


def has_rows(element: Any) -> tf.Tensor:
    """Tell an element with rows from an empty one, which few layers take."""
    rows = [rows_in(value) for value in tf.nest.flatten(element)]
    counts = [count for count in rows if count is not None]
    return tf.reduce_all(tf.greater(counts, 0)) if counts else tf.constant(True)


def _first_row(element: Any, spec: Any) -> Any:
    """Return the first row, but of what must have some number all of them."""
    return tf.nest.map_structure(
        lambda value, kind: (
            value if rows_of_type(kind) else take_rows(value, 0, 1)
        ),
        element,
        spec,
    )


def _close(element: Any) -> tf.Tensor:
    """Return one tensor that holds an element.

    `Dataset.scan` keeps no `tf.experimental.Optional` (TensorFlow 2.21), but
    it does keep what is in one. The element is copied: a step may write into
    its tensors, which may be arrays of the user's, or files.
    """
    leaves = tf.nest.flatten(element, expand_composites=True)
    return tf.raw_ops.OptionalFromValue(
        components=[_copy(leaf) for leaf in leaves if leaf is not None]
    )


def _copy(tensor: tf.Tensor) -> tf.Tensor:
    # What a variant holds is never written to, and cannot be copied.
    is_variant = tensor.dtype == tf.variant
    return tensor if is_variant else tf.raw_ops.DeepCopy(x=tensor)


def _open(box: tf.Tensor, spec: Any) -> Any:
    """Return the element in a box."""
    leaves = tf.nest.flatten(spec, expand_composites=True)
    specs = [leaf for leaf in leaves if isinstance(leaf, tf.TensorSpec)]
    tensors = iter(
        tf.raw_ops.OptionalGetValue(
            optional=box,
            output_types=[leaf.dtype for leaf in specs],
            output_shapes=[leaf.shape for leaf in specs],
        )
    )
    # The others stand for None, in which there is nothing.
    values = [
        next(tensors) if isinstance(leaf, tf.TensorSpec) else None
        for leaf in leaves
    ]
    return tf.nest.pack_sequence_as(spec, values, expand_composites=True)


class Rows(NamedTuple):
    """How many rows of a batch replicas have; scalars of int32.

    A replica whose part is empty holds a row all the same, since few layers
    take none. It counts for nothing, and is not counted here. What is no batch
    counts as one row.

    Attributes:
        total: Of all replicas. 0 of a batch that has no rows anywhere.
        own: Of each replica of this worker, by its local rank.
    """

    total: tf.Tensor
    own: tuple[tf.Tensor, ...]


class Ending(NamedTuple):
    """A note on data of which the last batch may lack parts."""

    note: tf.Tensor


class Counted(PerReplica):
    """Each replica's part of a tensor of a batch, and the batch's rows.

    `strategy.run` hands each replica its own part, and there is no public way
    to tell it anything about the whole. All tensors say so, since users may
    pass them in any order.

    Parts have a type that all share. They themselves may say more, such as that
    this one has two rows. A step that were traced for that would not be the one
    of a replica with one row.
    """

    may_lack = False  # Whether a part of a fixed size may be there for nothing.

    def __init__(
        self, parts: Any, rows: Rows, spec: tf.TypeSpec | None = None
    ) -> None:
        super().__init__(parts)
        self.rows, self._spec = rows, spec

    @property
    def is_full(self) -> bool:
        """Whether parts are known to have as many rows as they show."""
        if self._spec is None or self.may_lack:
            return False
        return all(rows_of_type(spec) for spec in self._spec._value_specs)

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
        return self.value_type(parts, Rows(total, tuple(own)), self)


class Lacking(Counted):
    """Parts of data that may end on some replicas before they do on others."""

    may_lack = True


class LackingSpec(CountedSpec):
    """The type of a `Lacking`."""

    value_type = property(lambda self: Lacking)


def with_rows(element: Any, rows: Rows, spec: Any = None) -> Any:
    """Return a batch whose tensors say how many rows there are.

    Args:
        element: Each replica's part.
        rows: Of these.
        spec: The type of the batch, None if it is that of these parts.
    """
    leaves = tf.nest.flatten(element)
    if spec is None:
        found = [Counted(leaf.values, rows) for leaf in leaves]
    else:
        pairs = zip(leaves, tf.nest.flatten(spec), strict=True)
        found = [
            each.value_type(leaf.values, rows, each) for leaf, each in pairs
        ]
    return tf.nest.pack_sequence_as(element, found)


def spec_with_rows(spec: Any) -> Any:
    """Return the specification of such batches: functions may ask for it.

    Args:
        spec: That of parts and of notes on them.
    """
    parts, note = spec
    kind = LackingSpec if isinstance(note, Ending) else CountedSpec
    found = [kind(*leaf._value_specs) for leaf in tf.nest.flatten(parts)]
    return tf.nest.pack_sequence_as(parts, found)


def regroup(parts: Sequence[Any], rows: Rows) -> Any:
    """Return a batch of which each replica of this worker has a part."""
    return with_rows(regroup_values(parts, always_wrap=True), rows)


def rows_of(arguments: Any) -> Rows | None:
    """Return the rows of the batch among the arguments, None without one."""
    counted = [
        leaf for leaf in tf.nest.flatten(arguments) if isinstance(leaf, Counted)
    ]
    return counted[0].rows if counted else None
