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

from tf_optimizers.workers.data.batch_splits import blank

_SLOTS = 8  # What has more parts has several in some.
# At most so many elements of so many rows are looked at.
_ROWS, _COLUMNS = 256, 64
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
BY_HAND = (
    "All workers must pass the same rows to `train_on_batch`, `test_on_batch` "
    "and `predict_on_batch`, which share them among replicas.",
    "Pass the whole batch on every worker. If each worker has data of its own, "
    "use `fit`, `evaluate` or `predict`, with "
    "`distribute_datasets_from_function`. If all have the same rows, and "
    "what is random makes them look different, set "
    "`strategy.compares_data = False`.",
)
_HINT = (
    "Workers may shuffle, filter or augment by random numbers of their own, or "
    "one may have drawn some alone, from Python's or NumPy's generator, as in "
    "a callback, or by looking at a batch: give what draws a seed or a "
    "generator of its own, and let all workers draw. If each worker is to have "
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
    # Few ops: a step waits for them, and a fit until they have been traced.
    prints = [
        [tf.fingerprint(_sample(tensor, number)) for tensor in tensors]
        for tensors in map(_tensors, tf.nest.flatten(batch))
        if tensors
    ]
    slots = [prints[i::_SLOTS] for i in range(min(len(prints), _SLOTS))]
    if not slots:
        return tf.zeros([2 * _SLOTS], tf.int32)
    says = tf.stack([_says_something(slot) for slot in slots])
    bits = tf.concat([_digest(slot) for slot in slots], 0)[:, :4]
    # A digest is never 0, which stands for a slot without parts.
    own = tf.bitwise.bitwise_or(tf.bitcast(bits, tf.int32), 1)
    both = tf.stack([tf.cast(says, tf.int32), own])
    return tf.reshape(tf.pad(both, [[0, 0], [0, _SLOTS - len(slots)]]), [-1])


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
    rows, columns = _rows_and_columns(tensor)
    down, right = 1 + rows // _ROWS, 1 + columns // _COLUMNS
    # In time, all elements have their turn.
    return tf.reshape(tensor, [rows, columns])[
        number % down :: down, number % right :: right
    ]


def _rows_and_columns(tensor: tf.Tensor) -> tuple[Any, Any]:
    """Return the sides of a tensor as a matrix: integers, if they are known."""
    if tensor.shape.rank == 0:
        return 1, 1
    shape = tf.shape(tensor, out_type=tf.int64)
    if tensor.shape.rank is None:  # It may still be a scalar.
        shape, rows = tf.concat([shape, [1]], 0), None
    else:
        rows = tensor.shape[0]
    columns = tensor.shape[1:].num_elements()
    return (
        shape[0] if rows is None else rows,
        tf.reduce_prod(shape[1:]) if columns is None else columns,
    )


def _says_something(slot: list[list[tf.Tensor]]) -> tf.Tensor:
    """Tell whether the rows of a slot are not all the same."""
    differ = [tf.reduce_any(prints[0] != prints[0][:1]) for prints in slot]
    return tf.reduce_any(differ) if len(differ) > 1 else differ[0]


def _digest(slot: list[list[tf.Tensor]]) -> tf.Tensor:
    """Return the bytes of a digest, as a row."""
    return tf.fingerprint(tf.reshape(tf.concat(sum(slot, []), 0), [1, -1]))


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


def check(known: tf.Tensor, rule: str = _RULE, hint: str = _HINT) -> Any:
    """Raise an error, or return an op that does, if workers differ.

    Args:
        known: A summary.
        rule: How the error begins.
        hint: How it ends.
    """
    verdict = known[2]
    received = tf.where(
        verdict == Verdict.ENDED,
        "Received: the end of the data on some workers only.",
        "Received: batches that differ between workers.",
    )
    message = tf.strings.join([rule, received, hint], " ")
    if tf.executing_eagerly():  # Where an assertion would cut the message.
        if verdict != Verdict.SAME:
            text = message.numpy().decode()
            raise tf.errors.InvalidArgumentError(None, None, text)
        return None
    return tf.debugging.Assert(verdict == Verdict.SAME, [message])
