"""What is noted on each element of a worker's data: its rows, and the next's.

With two replicas on a worker, which take turns, and three elements:

    element            a        b        c
    has one, rows      1, 4     1, 4     1, 2
    two later          1, 2     0, 0     0, 0
"""

from typing import Any

import tensorflow as tf

from tf_optimizers.distribute.boxes import close, open_box
from tf_optimizers.distribute.uneven_batches import count_rows


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
        return close(element), tf.stack([1, rows])

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
        .map(lambda box, note: (open_box(box, spec), note))
    )


def _nothing() -> tuple[tf.Tensor, tf.Tensor]:
    """Return an empty box, and the note of no element."""
    return close(()), tf.zeros([2], tf.int32)
