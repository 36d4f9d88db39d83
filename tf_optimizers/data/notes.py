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

from tf_optimizers._compat.distribution import PerReplica, PerReplicaSpec
from tf_optimizers._compat.distribution import regroup as regroup_values
from tf_optimizers.data.parts import blank, rows_in, rows_of_type, take_rows

# AutoGraph takes longer to read these functions than they take to run.
_as_it_is = tf.autograph.experimental.do_not_convert


def note_next(
    dataset: tf.data.Dataset,
    parts_of: Callable[..., Sequence[tuple[Any, tf.Tensor]]],
    replicas: int,
    end: Sequence[int],
    is_endless: bool = False,
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

    Returns:
        Parts, each with an int32 [1, 2, size of a note].
    """
    # Each function that is mapped costs time, when it is traced, when an
    # iterator is made, and in each step: so there are three.
    spec: Any = None

    @_as_it_is
    def close(*element: Any) -> Any:
        nonlocal spec
        parts, notes = zip(*parts_of(*element), strict=True)
        spec = tf.nest.map_structure(tf.type_spec_from_value, parts[0])
        closed = list(map(_close, parts)), list(map(_has_rows, parts))
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
        return (full, *others, last), (_open(first, spec), notes)

    ends = tf.data.Dataset.range(1).repeat(None if is_endless else replicas)
    return (
        closed.concatenate(ends.map(end_with))
        .scan((nothing()[0], *[nothing()] * replicas), open_first)
        .skip(replicas)
    )


def _has_rows(element: Any) -> tf.Tensor:
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
    take none. It counts for nothing, and is not counted here.

    Attributes:
        total: Of all replicas.
        own: Of each replica of this worker, by its local rank.
    """

    total: tf.Tensor
    own: tuple[tf.Tensor, ...]


class Parts(PerReplica):
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


class PartsSpec(PerReplicaSpec):
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
    return with_rows(regroup_values(parts, always_wrap=True), rows)


def rows_of(arguments: Any) -> Rows | None:
    """Return the rows of the batch among the arguments, None without one."""
    counted = [
        leaf for leaf in tf.nest.flatten(arguments) if isinstance(leaf, Counted)
    ]
    return counted[0].rows if counted else None
