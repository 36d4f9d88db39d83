"""What is noted on each element of a worker's data: its rows, and the next's.

With two replicas on a worker, which take turns, and three elements:

    element            a        b        c
    has one, rows      1, 4     1, 4     1, 2
    two later          1, 2     0, 0     0, 0
"""

from typing import Any

import tensorflow as tf

from tf_optimizers.distribute.share import count_rows


def add_notes(dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
    """Pair every element with a note on it and on what its replica has next.

    An element comes when the one that is `replicas` later is there, too.

    Args:
        dataset: That of a worker.
        replicas: How many draw from it, in turn.

    Returns:
        Elements, each with an int32 [1, 2, 2]: in the first row, 1 and the
        rows of the element; in the second, those of the later one, zeros if
        there is none.
    """
    spec = dataset.element_spec

    def note(*parts: Any) -> Any:
        element = parts if isinstance(spec, tuple) else parts[0]
        rows = count_rows(element)
        rows = 0 if rows is None else tf.cast(rows, tf.int32)
        return _close(element), tf.stack([1, rows])

    def end(_: tf.Tensor) -> Any:
        return _nothing()

    def add_later(waiting: Any, last: Any) -> Any:
        (box, here), *others = waiting
        later = last[1]
        return (*others, last), (box, tf.stack([here, later])[tf.newaxis])

    return (
        dataset.map(note)
        .concatenate(tf.data.Dataset.range(replicas).map(end))
        .scan((_nothing(),) * replicas, add_later)
        .skip(replicas)
        .map(lambda box, note: (_open(box, spec), note))
    )


def _nothing() -> tuple[tf.Tensor, tf.Tensor]:
    """Return an empty box, and the note of no element."""
    return tf.raw_ops.OptionalNone(), tf.zeros([2], tf.int32)


def _close(element: Any) -> tf.Tensor:
    """Return one tensor that holds an element.

    `Dataset.scan` keeps no `tf.experimental.Optional` (TensorFlow 2.21), but
    it does keep what is in one. The element is copied: a step may write into
    its tensors, which may be arrays of the user's, or files.
    """
    leaves = tf.nest.flatten(element, expand_composites=True)
    return tf.raw_ops.OptionalFromValue(
        components=[
            tf.raw_ops.DeepCopy(x=leaf) for leaf in leaves if leaf is not None
        ]
    )


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
