"""What is noted on each element of a worker's data: its rows, and the next's.

With two replicas on a worker, which take turns, and three elements:

    element            a        b        c        c'       c'
    has one, rows      1, 4     1, 4     1, 2     0, 0     0, 0   ...
    two later          1, 2     0, 0     0, 0     0, 0     0, 0

c' is the first row of c. A worker whose data have ended goes on with it for as
long as others have some, as few layers take a batch without rows.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.distribute.parts import (
    blank,
    rows_in,
    rows_of_type,
    take_rows,
)

# AutoGraph takes longer to read these functions than they take to run.
_as_it_is = tf.autograph.experimental.do_not_convert


def note_next(
    dataset: tf.data.Dataset,
    replicas: int,
    end: Sequence[int],
    is_endless: bool = False,
) -> tf.data.Dataset:
    """Add to the note on every element that on what its replica has next.

    An element comes when the one that is `replicas` later is there, too.

    Args:
        dataset: That of a worker: pairs of an element and a note, an int32
            vector.
        replicas: How many draw from it, in turn.
        end: The note on what comes after the last element.
        is_endless: Whether to go on after that with the first row of the last
            element, none of which counts.

    Returns:
        Elements, each with an int32 [1, 2, size of a note].
    """
    spec, _ = dataset.element_spec

    @_as_it_is
    def close(element: Any, note: tf.Tensor) -> Any:
        return _close(element), _has_rows(element), note

    def nothing() -> Any:
        return _close(blank(spec)), tf.constant(False), tf.constant(end)

    @_as_it_is
    def add_later(state: Any, last: Any) -> Any:
        full, (box, has_rows, here), *others = state
        # What there is to repeat a row of.
        full = tf.cond(has_rows, lambda: box, lambda: full)
        notes = tf.stack([here, last[2]])[tf.newaxis]
        return (full, *others, last), (full, has_rows, notes)

    @_as_it_is
    def open_box(box: tf.Tensor, has_rows: tf.Tensor, notes: tf.Tensor) -> Any:
        def repeated() -> tf.Tensor:
            return _close(_first_row(_open(box, spec), spec))

        return _open(tf.cond(has_rows, lambda: box, repeated), spec), notes

    @_as_it_is
    def end_with(_: tf.Tensor) -> Any:
        return nothing()

    ends = tf.data.Dataset.range(1).repeat(None if is_endless else replicas)
    return (
        dataset.map(close)
        .concatenate(ends.map(end_with))
        .scan((nothing()[0], *[nothing()] * replicas), add_later)
        .skip(replicas)
        .map(open_box)
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
    # A variant holds what nobody writes into, and cannot be copied.
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
