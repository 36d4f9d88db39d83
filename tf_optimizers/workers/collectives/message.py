"""Packs a replica's values into one message of 32-bit words.

The order of values in a message is

    entries | values and indices of rows | dense values, by dtype

Two workers exchange messages as follows:

    worker 0                       worker 1
    entries, biases                entries, biases
        └──────────── all-gather ──────┘
    entries of all, biases of 0 + biases of 1: the same on both

So small dense values, such as biases, need no separate round. But each replica
sends these values to every other replica.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_optimizers.codes.entries import (
    Entries,
    WordReader,
    join,
    narrow_indices,
    pack_entries,
    packed_words,
    split,
    to_words,
    unpack_entries,
)
from tf_optimizers.kernels import sum_rows
from tf_optimizers.workers.collectives.progress import DTYPES


class Content(NamedTuple):
    """The values in the message of one replica.

    Attributes:
        entries: `Entries`, such as compressed gradients.
        slices: `IndexedSlices`, such as sparse gradients.
        groups: Dense values, grouped by dtype.
        rows: For each of `slices`, the numbers of rows on all replicas.
    """

    entries: Sequence[Entries] = ()
    slices: Sequence[tf.IndexedSlices] = ()
    groups: Sequence[Sequence[tf.Tensor]] = ()
    rows: Sequence[tf.Tensor] = ()


def pack(content: Content) -> tf.Tensor:
    """Return a replica's message, a vector of int32 words.

    The rows of `IndexedSlices` are padded to the largest number of rows on any
    replica.
    """
    entries, slices, groups, rows = content
    words = [tf.reshape(pack_entries(entries), [-1])] if entries else []
    words += [
        to_words(pad_rows(tensor, _most(counts)))
        for each, counts in zip(slices, rows, strict=True)
        for tensor in (each.values, narrow_indices(each))
    ]
    words += [to_words(join(group)) for group in groups]
    return tf.concat(words, 0)


def unpack(
    gathered: tf.Tensor, content: Content, replicas: int
) -> tuple[list[Entries], list[tf.IndexedSlices], list[list[tf.Tensor]]]:
    """Return all replicas' entries and slices, and the sums of dense values.

    Entries and slices are in the order of replicas.

    Args:
        gathered: The messages of all replicas; int32 [replicas * words].
        content: This replica's values, which determine dtypes and shapes.
        replicas: The number of replicas.
    """
    entries, slices, groups, rows = content
    words = WordReader(gathered, replicas)
    every = []
    if entries:
        own = words.read(tf.int32, [packed_words(entries)])
        every = unpack_entries(own, entries)
    joined = [
        tf.IndexedSlices(
            _read(words, each.values, counts),
            tf.cast(
                _read(words, narrow_indices(each), counts), each.indices.dtype
            ),
            each.dense_shape,
        )
        for each, counts in zip(slices, rows, strict=True)
    ]
    return every, joined, [sum_replicas(words, group) for group in groups]


def layout(content: Content) -> int:
    """Return a checksum, at least 1, of a message's dtypes and shapes.

    Numbers of rows are left out, since they may differ between replicas. The
    instance key of the message depends on the checksum, so that no replica
    decodes values in a wrong dtype or shape.
    """
    described = [
        [(e.code, e.values.shape[0], e.size) for e in content.entries],
        [
            (s.values.dtype.name, narrow_indices(s).dtype.name)
            + tuple(s.values.shape[1:])
            for s in content.slices
        ],
        [
            (group[0].dtype.name, *(value.shape.as_list() for value in group))
            for group in content.groups
        ],
    ]
    return 1 + zlib.crc32(repr(described).encode())


def pad_rows(tensor: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Append rows of zeros until a tensor has `rows` rows."""
    missing = rows - tf.shape(tensor)[0]
    return tf.pad(tensor, [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1))


def sum_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sum the values of rows with the same index, so that no row occurs twice.

    Rows keep the order of their first appearance. The sums are bit-identical on
    all replicas.
    """
    rows, places = tf.unique(slices.indices)
    dtype = slices.values.dtype
    values = slices.values
    if dtype in (tf.float16, tf.bfloat16):
        # In half precision, a long sum could lose small values by rounding.
        values = tf.cast(values, tf.float32)
    totals = sum_rows(values, places, tf.size(rows))
    totals = tf.ensure_shape(totals, [None, *values.shape[1:]])
    return tf.IndexedSlices(tf.cast(totals, dtype), rows, slices.dense_shape)


def _read(words: WordReader, like: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Read the next rows of all replicas, and drop the padding."""
    most = _most(counts)
    tensor = words.read(like.dtype, [most, *like.shape[1:]])
    return tf.boolean_mask(tensor, tf.sequence_mask(counts, most))


def _most(counts: tf.Tensor) -> tf.Tensor:
    """Return the largest number of rows on any replica, but at least 1.

    TensorFlow (2.21) crashes in an all-gather without elements.
    """
    return tf.maximum(tf.reduce_max(counts), 1)


# The cost of a round, in bytes. A network of 1 Gbit/s sends this many bytes in
# a round trip of 1 ms, and a network of 100 Mbit/s in a round trip of 10 ms.
# The constant decides between an all-gather and an all-reduce. The network is
# not measured, since a wrong decision costs little: at most twice these bytes,
# or the rounds of an all-reduce.
ROUND_BYTES = 1 << 17


def is_gathered(values: Sequence[tf.Tensor], replicas: int) -> bool:
    """Return whether to gather values of one dtype, and to sum them locally.

    The alternative, an all-reduce, takes additional rounds. But in a gather,
    each replica sends the values to every other replica.
    """
    sizes = [value.shape.num_elements() for value in values]
    if None in sizes or values[0].dtype not in DTYPES:
        return False
    bytes_sent = (replicas - 1) * sum(sizes) * values[0].dtype.size
    return 0 < bytes_sent <= 2 * ROUND_BYTES


def sum_replicas(
    words: WordReader, values: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return the sums of dense values over replicas.

    Args:
        words: The reader of the messages, positioned at these values.
        values: This replica's values, which determine the dtype and shapes.
    """
    size = sum(value.shape.num_elements() for value in values)
    every = words.read(values[0].dtype, [size])
    # `tf.reduce_sum` would add in an order that depends on the number of cores.
    return split(tf.add_n(tf.unstack(every)), values)
