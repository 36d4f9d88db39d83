"""Compares the batches that workers draw, by digests of samples.

Everything is in a note, an int32 vector, which is summed up over replicas:

    has one, rows, how to compare, says something 0..7, digest 0..7

A digest is of a part of the batch, such as its images or its labels. It is
taken of a sample of bounded size, another one in each batch.

Random augmentation makes the images of a batch differ between workers although
their rows are the same. Then the labels still agree, which says so, unless all
of them are the same in this batch.
"""

import enum
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.data.parts import blank

_SLOTS = 8  # What has more parts has several in some.
_ELEMENTS = 4096
_ROWS = 256
# So many batches of augmented data in a row may leave open what they are.
_PATIENCE = 64


class Comparison(enum.IntEnum):
    """How what workers draw must compare."""

    NOT = 0  # Each has data of its own.
    SOME = 1  # Random parts may differ.
    ALL = 2


class Verdict(enum.IntEnum):
    """What a comparison has shown."""

    SAME = 0
    DIFFERENT = 1
    ENDED = 2  # On some workers only.


__all__ = ["blank"]  # Which iterators ask for here, too.

# The summary of notes before the first.
UNKNOWN = (-1, 0, Verdict.SAME, 0, *[0] * _SLOTS)
_RULE = "All workers must draw the same batches of data that they share."
_HINT = (
    "Workers may shuffle, filter or augment by random numbers of their own, or "
    "one may have drawn some alone, from Python's or NumPy's generator, or by "
    "looking at a batch: give what draws a seed or a generator of its own, and "
    "let all workers draw. If each worker is to have "
    "data of its own, set "
    "`options.experimental_distribute.auto_shard_policy` to `OFF`, or use "
    "`distribute_datasets_from_function`. If all have the same rows, and what "
    "is random makes them look different, set `strategy.compares_data = False`."
)


def note(
    rows: Any, comparison: Comparison, digests: tf.Tensor | None = None
) -> tf.Tensor:
    """Return the note on a replica's part, with the rows of it that count."""
    if digests is None:
        digests = tf.zeros([2 * _SLOTS], tf.int32)
    head = tf.stack([1, rows, int(comparison)])
    return tf.ensure_shape(tf.concat([head, digests], 0), [3 + 2 * _SLOTS])


def end(comparison: Comparison) -> list[int]:
    """Return the note on what comes after the last batch."""
    return [0, 0, int(comparison), *[0] * (2 * _SLOTS)]


def digests(batch: Any, number: tf.Tensor) -> tf.Tensor:
    """Return an int32 [16]: what parts say something, and their digests.

    Args:
        batch: A nest of tensors of any kind.
        number: Of the batch; scalar of int64.
    """
    slots: list[list[Any]] = [[] for _ in range(_SLOTS)]
    parts = filter(None, map(_tensors, tf.nest.flatten(batch)))
    for i, tensors in enumerate(parts):
        slots[i % _SLOTS].append(
            [tf.fingerprint(_sample(tensor, number)) for tensor in tensors]
        )
    return tf.stack([*map(_says_something, slots), *map(_digest, slots)])


def _tensors(value: Any) -> list[tf.Tensor]:
    """Return the tensors of a value, first that of its elements."""
    if isinstance(value, tf.SparseTensor):
        return [value.values, value.indices, value.dense_shape]
    tensors = tf.nest.flatten(value, expand_composites=True)
    return [
        tensor
        for tensor in tensors
        if tensor is not None and tensor.dtype != tf.variant
    ]


def _sample(tensor: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Return some elements of some rows, as a matrix."""
    size, shape = (
        function(tensor, out_type=tf.int64) for function in (tf.size, tf.shape)
    )
    rows = tf.concat([shape, [1]], 0)[0]
    columns = size // tf.maximum(rows, 1)
    matrix = tf.reshape(tensor, tf.stack([rows, columns]))
    height = tf.clip_by_value(rows, 1, _ROWS)
    down = 1 + (rows - 1) // height
    right = 1 + (columns - 1) // (_ELEMENTS // height)
    # In time, all elements have their turn.
    return matrix[number % down :: down, number % right :: right]


def _says_something(values: list[list[tf.Tensor]]) -> tf.Tensor:
    """Return 1 if the rows of a slot are not all the same, 0 otherwise."""
    differ = [tf.reduce_any(prints[0] != prints[0][:1]) for prints in values]
    return tf.cast(tf.reduce_any(differ) if differ else False, tf.int32)


def _digest(values: list[list[tf.Tensor]]) -> tf.Tensor:
    """Return a digest other than 0 of a slot, or 0 of an empty one."""
    if not values:
        return tf.constant(0)
    prints = tf.concat(sum(values, []), 0)
    bits = tf.fingerprint(tf.reshape(prints, [1, -1]))[0, :4]
    return tf.bitwise.bitwise_or(tf.bitcast(bits, tf.int32), 1)


def summarize(notes: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """Return what all notes on a batch say.

    Args:
        notes: Those of all replicas, int32 [replicas, 19].
        before: The summary of the batch before.

    Returns:
        An int32 vector: how many replicas have a part, the rows of all, a
        `Verdict`; for the next summary, how many batches in a row have left
        open what they are, and which slots have said something so far.
    """
    count, rows = tf.unstack(tf.reduce_sum(notes[:, :2], 0))
    comparison = tf.reduce_min(notes[:, 2])
    says, digests = tf.split(notes[:, 3:], 2, axis=1)
    same = tf.reduce_all(digests == digests[:1], 0)
    is_used = digests[0] != 0
    told = before[4:] > 0
    speaks = is_used & same & tf.reduce_all(says > 0, 0)
    differs = ~same
    is_open = tf.reduce_any(differs) & ~tf.reduce_any(speaks)
    # Labels that have always agreed, and do, may be all the same in a batch.
    is_wrong = is_open & (
        tf.reduce_any(differs & told)
        | ~tf.reduce_any(is_used & same)
        | (~tf.reduce_any(told) & (before[3] >= _PATIENCE))
    )
    is_wrong |= tf.reduce_any(differs) & (comparison == Comparison.ALL)
    has_ended = (count > 0) & (count < tf.shape(notes)[0])
    verdict = tf.where(
        comparison == Comparison.NOT,
        int(Verdict.SAME),
        tf.where(
            has_ended,
            int(Verdict.ENDED),
            tf.where(is_wrong, int(Verdict.DIFFERENT), int(Verdict.SAME)),
        ),
    )
    doubts = tf.where(is_open, before[3] + 1, 0)
    head = tf.stack([count, rows, verdict, doubts])
    return tf.concat([head, tf.cast(told | speaks, tf.int32)], 0)


def goes_on(known: tf.Tensor) -> tf.Tensor:
    """Tell from a summary whether there may be another batch."""
    return (known[0] > 0) & (known[2] == Verdict.SAME)


def start(last: tf.Variable | None) -> Sequence[int]:
    """Return the summary to begin with, after an iterator with the last one."""
    if last is None:
        return UNKNOWN
    return [*UNKNOWN[:3], *last.numpy()[3:]]


def check(known: tf.Tensor) -> Any:
    """Raise an error, or return an op that does, if workers differ."""
    verdict = known[2]
    received = tf.where(
        verdict == Verdict.ENDED,
        "Received: the end of the data on some workers only.",
        "Received: batches that differ between workers.",
    )
    message = tf.strings.join([_RULE, received, _HINT], " ")
    if tf.executing_eagerly():  # Where an assertion would cut the message.
        if verdict != Verdict.SAME:
            text = message.numpy().decode()
            raise tf.errors.InvalidArgumentError(None, None, text)
        return None
    return tf.debugging.Assert(verdict == Verdict.SAME, [message])
