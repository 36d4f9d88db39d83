"""Compares the batches that workers draw, by digests of samples.

Each replica describes its part of a batch in a note, an int32 vector:

    has_part, rows, comparison, is_informative[8], digest[8]

The function `summarize` reduces the notes of all replicas to a summary.

A note has 8 slots, for digests of the components of the whole batch, such as
images and labels. With more than 8 components, some share a slot. A digest
covers a limited number of elements of each component. If a component has more,
the sampled positions change from batch to batch.

Random augmentation makes images differ between workers, even if the rows are
the same. Then equal labels show that the rows are the same, but only if the
labels are informative: they must differ between rows of the batch.
"""

import enum
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.workers.data.batch_splits import counts_of_rows

_SLOTS = 8
SIZE = 3 + 2 * _SLOTS  # The length of a note that workers exchange.
# The largest sample of a tensor: the number of rows, and of elements per row.
_ROWS, _COLUMNS = 256, 64
_FACTOR = 40_503_001  # Odd, so that products depend on all bits of a number.
# How many consecutive undecided batches (see `summarize`) are accepted if no
# slot was ever equal and informative.
_PATIENCE = 64


class Comparison(enum.IntEnum):
    """What workers compare in their batches."""

    NOTHING = 0  # For example, each worker has its own data.
    ROWS = 1  # The choice of rows. Random augmentation may differ.
    ALL = 2  # All components of a batch.


class Verdict(enum.IntEnum):
    """The result of a comparison."""

    SAME = 0
    DIFFERENT = 1
    ENDED = 2  # Only some replicas have a part of the batch.


# The summary before the first batch.
UNKNOWN = (-1, 0, Verdict.SAME, 0, *[0] * _SLOTS)
_RULE = "All workers must draw the same batches of shared data."
BY_HAND = (
    "All workers must pass the same rows to `train_on_batch`, `test_on_batch` "
    "and `predict_on_batch`, which split the rows among replicas.",
    "Pass the whole batch on every worker. If each worker has its own data, "
    "use `fit`, `evaluate` or `predict`, with "
    "`distribute_datasets_from_function`. If all workers have the same rows, "
    "and random augmentation makes them look different, set "
    "`strategy.compares_data = False`.",
    "an error",
)
_ENDED = "the end of the data"
_HINT = (
    "Workers may shuffle, filter or augment with different random numbers. Or "
    "one worker alone may have drawn a batch, or a random number from Python "
    "or NumPy, for example in a callback. Or `next(iter(data))` may have read "
    "ahead, further on one worker than on another, and so drawn such numbers: "
    "set the seed after this call. Set the same seed on all workers. If "
    "one worker alone needs random numbers, draw them from a separate "
    "generator. If each worker should have its own data, set "
    "`options.experimental_distribute.auto_shard_policy` to `OFF`, or use "
    "`distribute_datasets_from_function`. If all workers have the same rows, "
    "and random augmentation makes them look different, set "
    "`strategy.compares_data = False`."
)


def note(
    rows: Any,
    comparison: Comparison,
    digests: tf.Tensor | None = None,
    total: Any = None,
) -> tf.Tensor:
    """Describe a replica's part of a batch in a note, an int32 vector.

    Args:
        rows: The number of rows in the part, without padding.
        comparison: How to compare the batch.
        digests: The result of the function `digests`. Defaults to zeros.
        total: The number of rows on all replicas, if this worker knows it. The
            note then ends with this number, which is not exchanged.
    """
    if digests is None:
        digests = tf.zeros([2 * _SLOTS], tf.int32)
    head = tf.stack([1, rows, int(comparison)])
    tail = [] if total is None else [[total]]
    note = tf.concat([head, digests, *tail], 0)
    return tf.ensure_shape(note, [SIZE + len(tail)])


def end(comparison: Comparison, has_total: bool = False) -> list[int]:
    """Return the note of a replica whose data have ended.

    With `has_total`, the note has one more element, for the total of rows.
    """
    return [0, 0, int(comparison), *[0] * (2 * _SLOTS + has_total)]


def digests(batch: Any, number: tf.Tensor) -> tf.Tensor:
    """Return 8 flags (1 if a slot is informative) and 8 digests, as int32 [16].

    Args:
        batch: A nest of tensors of any kind.
        number: The index of the batch, an int64 scalar.
    """
    # Use few ops: they run for each batch, and tracing them delays `fit`.
    prints = [
        [tf.fingerprint(_sample(tensor, number)) for tensor in tensors]
        for tensors in map(_tensors, tf.nest.flatten(batch))
        if tensors
    ]
    slots = [prints[i::_SLOTS] for i in range(min(len(prints), _SLOTS))]
    if not slots:
        return tf.zeros([2 * _SLOTS], tf.int32)
    informative = tf.stack([_is_informative(slot) for slot in slots])
    bits = tf.concat([_digest(slot) for slot in slots], 0)[:, :4]
    # 0 stands for an unused slot, so no digest may be 0.
    own = tf.bitwise.bitwise_or(tf.bitcast(bits, tf.int32), 1)
    both = tf.stack([tf.cast(informative, tf.int32), own])
    return tf.reshape(tf.pad(both, [[0, 0], [0, _SLOTS - len(slots)]]), [-1])


def with_form(digests: tf.Tensor, batch: Any) -> tf.Tensor:
    """Return digests that also depend on dtypes and numbers of rows.

    If two batches differ in the dtype or number of rows of a value, or if a
    value is None in only one of them, their digests almost certainly differ.

    Args:
        digests: The result of the function `digests`.
        batch: A nest of tensors of any kind. Values may be None.
    """
    dtypes = [getattr(leaf, "dtype", None) for leaf in tf.nest.flatten(batch)]
    counts = counts_of_rows(batch)
    factors = [pow(_FACTOR, i, 1 << 31) for i in range(1, len(counts) + 1)]
    rows = tf.reduce_sum(tf.stack(counts) * tf.constant(factors))
    code = zlib.crc32(repr(dtypes).encode()) >> 1
    # A digest stays odd, and the 0 of an unused slot stays 0.
    scale = tf.stack([1, 2 * (rows + code) + 1])
    return digests * tf.repeat(scale, _SLOTS)


def _tensors(value: Any) -> list[tf.Tensor]:
    """Return a value's tensors except variants, beginning with its elements."""
    if isinstance(value, tf.SparseTensor):
        return [value.values, value.indices, value.dense_shape]
    tensors = tf.nest.flatten(value, expand_composites=True)
    return [
        tensor
        for tensor in tensors
        if tensor is not None and tensor.dtype != tf.variant
    ]


def _sample(tensor: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Return at most `_ROWS` * `_COLUMNS` elements of a tensor, as a matrix."""
    rows, columns = _rows_and_columns(tensor)
    down, right = 1 + rows // _ROWS, 1 + columns // _COLUMNS
    # The samples of down * right consecutive batches cover all positions.
    return tf.reshape(tensor, [rows, columns])[
        number % down :: down, number // down % right :: right
    ]


def _rows_and_columns(tensor: tf.Tensor) -> tuple[Any, Any]:
    """Return a tensor's numbers of rows and columns, as ints if static.

    The number of columns is the product of all dimensions except the first.
    """
    if tensor.shape.rank == 0:
        return 1, 1
    shape = tf.shape(tensor, out_type=tf.int64)
    if tensor.shape.rank is None:  # The tensor may be a scalar.
        shape, rows = tf.concat([shape, [1]], 0), None
    else:
        rows = tensor.shape[0]
    columns = tensor.shape[1:].num_elements()
    return (
        shape[0] if rows is None else rows,
        tf.reduce_prod(shape[1:]) if columns is None else columns,
    )


def _is_informative(slot: list[list[tf.Tensor]]) -> tf.Tensor:
    """Return whether sampled rows differ in any component of a slot."""
    differ = [tf.reduce_any(prints[0] != prints[0][:1]) for prints in slot]
    return tf.reduce_any(differ) if len(differ) > 1 else differ[0]


def _digest(slot: list[list[tf.Tensor]]) -> tf.Tensor:
    """Return the digest of all components of a slot, as uint8 [1, 8]."""
    return tf.fingerprint(tf.reshape(tf.concat(sum(slot, []), 0), [1, -1]))


def summarize(notes: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """Compare the notes of all replicas on a batch; return their summary.

    Args:
        notes: The notes of all replicas, int32 [replicas, 19].
        before: The summary of the previous batch.

    Returns:
        An int32 [12]: the number of replicas that have a part; the number of
        rows on all replicas; a `Verdict`; the number of consecutive undecided
        batches up to this one; and 8 flags. The flag of a slot is 1 once the
        slot has been informative and equal on all replicas in some batch.
    """
    count, rows = tf.unstack(tf.reduce_sum(notes[:, :2], 0))
    comparison = tf.reduce_min(notes[:, 2])
    informative, digests = tf.split(notes[:, 3:], 2, axis=1)
    same = tf.reduce_all(digests == digests[:1], 0)
    is_used = digests[0] != 0
    was_informative = before[4:] > 0
    agrees = is_used & same & tf.reduce_all(informative > 0, 0)
    differs = ~same
    is_undecided = tf.reduce_any(differs) & ~tf.reduce_any(agrees)
    # A batch is undecided if a slot differs, and no slot is both equal and
    # informative: for example, if images differ, and all labels are 0. With
    # `Comparison.ROWS`, an undecided batch counts as different in three cases:
    # - A slot that differs was equal and informative before.
    # - No used slot is equal on all replicas.
    # - Too many consecutive batches were undecided, and no slot was ever equal
    #   and informative.
    is_different = is_undecided & (
        tf.reduce_any(differs & was_informative)
        | ~tf.reduce_any(is_used & same)
        | (~tf.reduce_any(was_informative) & (before[3] >= _PATIENCE))
    )
    is_different |= tf.reduce_any(differs) & (comparison == Comparison.ALL)
    has_ended = (count > 0) & (count < tf.shape(notes)[0])
    verdict = tf.where(
        comparison == Comparison.NOTHING,
        int(Verdict.SAME),
        tf.where(
            has_ended,
            int(Verdict.ENDED),
            tf.where(is_different, int(Verdict.DIFFERENT), int(Verdict.SAME)),
        ),
    )
    undecided = tf.where(is_undecided, before[3] + 1, 0)
    head = tf.stack([count, rows, verdict, undecided])
    return tf.concat([head, tf.cast(was_informative | agrees, tf.int32)], 0)


def summarize_all(notes: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """Summarize the notes on several batches, one after another.

    Return the first summary, including `before`, whose verdict is not `SAME`.
    If there is none, return the last summary.

    Args:
        notes: The notes, an int32 [replicas, batches, 19]. A batch that no
            replica has is skipped.
        before: The summary of the previous batch.
    """

    def add(before: tf.Tensor, notes: tf.Tensor) -> tf.Tensor:
        later = summarize(notes, before)
        counts = (later[0] > 0) & (before[2] == Verdict.SAME)
        return tf.where(counts, later, before)

    return tf.foldl(add, tf.transpose(notes, [1, 0, 2]), before)


def summarize_own(
    note: tf.Tensor, replicas: int, before: tf.Tensor
) -> tf.Tensor:
    """Return the summary of a batch without an exchange of notes.

    The summary assumes that either all replicas have a part, or none.

    Args:
        note: The note of a replica of this worker. The last element is the
            total of rows on all replicas.
        replicas: The number of replicas of all workers.
        before: The summary of the previous batch.
    """
    return tf.concat([[note[0] * replicas, note[SIZE]], before[2:]], 0)


def start(last: tf.Variable | None) -> Sequence[int]:
    """Return the summary with which an iterator starts.

    Args:
        last: The variable of the dataset's last eager iterator, or None.
    """
    if last is None:
        return UNKNOWN
    return [*UNKNOWN[:3], *last.numpy()[3 : len(UNKNOWN)]]


def check(
    known: tf.Tensor, rule: str = _RULE, hint: str = _HINT, ended: str = _ENDED
) -> Any:
    """Raise an error if the verdict of a summary is not `SAME`.

    In a graph, return an op that raises the error.

    Args:
        known: The summary of a batch.
        rule: The first sentence of the error message.
        hint: The last sentences of the error message.
        ended: The event to report if only some workers have a batch.
    """
    verdict = known[2]
    received = tf.where(
        verdict == Verdict.ENDED,
        f"Received: {ended} on some workers only.",
        "Received: batches that differ between workers.",
    )
    message = tf.strings.join([rule, received, hint], " ")
    if tf.executing_eagerly():  # An assertion would truncate the message.
        if verdict != Verdict.SAME:
            text = message.numpy().decode()
            raise tf.errors.InvalidArgumentError(None, None, text)
        return None
    return tf.debugging.Assert(verdict == Verdict.SAME, [message])
