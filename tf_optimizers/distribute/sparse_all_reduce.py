"""All sparse values of a call in one all-gather.

    worker 0                          worker 1
    a: 2 entries, b: 1 row            a: 2 entries, b: 3 rows
        │ pack: as 32-bit words, rows padded
        ▼                                 ▼
    [a b.values b.indices]            one int32 buffer each
        └───────────── all-gather ────────┘
        ▼ unpack: the same on both
    a: 4 entries, b: 4 rows, those of worker 0 first

Padding needs to know the rows of everybody. They travel ahead, all in one
small all-gather, unless there are only `Entries`.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.collectives import CollectiveAllReduceHooks
from tf_optimizers._compat.extended import MultiWorkerExtendedHooks
from tf_optimizers._compat.replicas import in_xla
from tf_optimizers.distribute.entries import (
    Entries,
    narrow_indices,
    pack_entries,
    unpack_entries,
)
from tf_optimizers.distribute.words import WordReader, to_words


class SparseCollectiveAllReduce(CollectiveAllReduceHooks):
    """Collectives that pack sparse values, and dense ones of any dtype.

    The results are those of TensorFlow's own, which needs three all-gathers
    per `IndexedSlices` and cannot pack different dtypes.
    """

    def all_reduce(
        self, reduce_op: Any, value: Any, replica_id: int, options: Any
    ) -> Any:
        """Reduce a nest of tensors and `IndexedSlices` over all replicas."""
        _, reduced = self.exchange(
            [], tf.nest.flatten(value), replica_id, options, reduce_op
        )
        return tf.nest.pack_sequence_as(value, reduced)

    def exchange(
        self,
        entries: Sequence[Entries],
        values: Sequence[Any],
        replica_id: int,
        options: Any,
        reduce_op: Any = tf.distribute.ReduceOp.SUM,
    ) -> tuple[list[Entries], list[Any]]:
        """Return the entries of all replicas, and the reduced values.

        Args:
            entries: This replica's.
            values: Tensors and `IndexedSlices`.
            replica_id: The replica's local rank.
            options: TensorFlow's, of communication.
            reduce_op: What becomes of `values`.

        Raises:
            RuntimeError: If it will be compiled by XLA.
        """
        if self.replicas == 1:
            return list(entries), list(values)
        if in_xla():
            # It compiles for one device, and knows no collectives of CPUs.
            raise RuntimeError(
                "`SparseMultiWorkerMirroredStrategy` cannot exchange values "
                "under XLA. Received: a step that is compiled by XLA. Pass "
                "`jit_compile=False` to `compile` or `tf.function`."
            )
        kinds = list(map(_kind, values))
        groups: dict[Any, list[Any]] = {kind: [] for kind in kinds}
        for kind, value in zip(kinds, values, strict=True):
            groups[kind].append(value)
        slices = groups.pop(None, [])
        gathered, reduced = list(entries), {None: iter(slices)}
        if entries or slices:
            gathered, parts = self._gather_all(
                entries, slices, replica_id, options
            )
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                parts = [_divide(s, self.replicas) for s in parts]
            reduced[None] = iter(parts)
        for kind, group in groups.items():
            reduced[kind] = iter(
                self.all_reduce_dense(reduce_op, group, replica_id, options)
            )
        return gathered, [next(reduced[kind]) for kind in kinds]

    def _gather_all(
        self,
        entries: Sequence[Entries],
        slices: Sequence[tf.IndexedSlices],
        replica_id: int,
        options: Any,
    ) -> tuple[list[Entries], list[tf.IndexedSlices]]:
        """Return the entries and slices of all replicas."""
        with tf.device(self.device(replica_id)):
            rows = []
            if slices:
                local = tf.stack([tf.shape(s.indices)[0] for s in slices])
                every = self.all_gather(local[tf.newaxis], replica_id, options)
                rows = tf.unstack(every, num=len(slices), axis=1)
            words = pack(entries, slices, rows)
            gathered = self.all_gather(words, replica_id, options)
            return unpack(gathered, entries, slices, rows, self.replicas)


class SparseExtended(MultiWorkerExtendedHooks):
    """What the strategy does its work in, and what optimizers ask it for.

    The methods are those of a replica, in graphs and in eager mode.
    """

    collectives = SparseCollectiveAllReduce

    def exchange(
        self, entries: Sequence[Entries], values: Sequence[Any]
    ) -> tuple[list[Entries], list[Any]]:
        """Return the entries of all replicas, and the sums of other values."""
        return self.in_replica(
            self.channel.exchange, list(entries), list(values)
        )

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """Send every replica a row of [N, ...]; return those that came."""
        return self.in_replica(self.channel.all_to_all, rows)


def pack(
    entries: Sequence[Entries],
    slices: Sequence[tf.IndexedSlices],
    rows: Sequence[tf.Tensor],
) -> tf.Tensor:
    """Return values and positions as int32 words, padded to the most rows.

    Args:
        entries: This replica's.
        slices: This replica's.
        rows: Of each slices, their number by replica.
    """
    words = pack_entries(entries) if entries else []
    words += [
        to_words(pad_rows(tensor, _most(counts)))
        for part, counts in zip(slices, rows, strict=True)
        for tensor in (part.values, narrow_indices(part))
    ]
    return tf.concat(words, 0)


def unpack(
    gathered: tf.Tensor,
    entries: Sequence[Entries],
    slices: Sequence[tf.IndexedSlices],
    rows: Sequence[tf.Tensor],
    replicas: int,
) -> tuple[list[Entries], list[tf.IndexedSlices]]:
    """Return the entries and slices of all replicas, in their order.

    Args:
        gathered: int32 [replicas * words], as `pack` makes them.
        entries: This replica's, for dtypes and shapes.
        slices: Likewise.
        rows: As of `pack`.
        replicas: Their number.
    """
    words = WordReader(gathered, replicas)
    every = unpack_entries(words, entries) if entries else []
    return every, [
        tf.IndexedSlices(
            _read(words, part.values, counts),
            tf.cast(
                _read(words, narrow_indices(part), counts), part.indices.dtype
            ),
            part.dense_shape,
        )
        for part, counts in zip(slices, rows, strict=True)
    ]


def pad_rows(tensor: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Append rows of zeros up to a number of rows."""
    missing = rows - tf.shape(tensor)[0]
    return tf.pad(tensor, [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1))


def _read(words: WordReader, like: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Return the rows of every replica, without padding."""
    most = _most(counts)
    tensor = words.read(like.dtype, [most, *like.shape[1:]])
    return tf.boolean_mask(tensor, tf.sequence_mask(counts, most))


def _most(counts: tf.Tensor) -> tf.Tensor:
    """Return the rows to pad to: one at least.

    TensorFlow (2.21) ends the process in an all-gather of nothing.
    """
    return tf.maximum(tf.reduce_max(counts), 1)


def _divide(part: tf.IndexedSlices, count: int) -> tf.IndexedSlices:
    return tf.IndexedSlices(part.values / count, part.indices, part.dense_shape)


def _kind(value: Any) -> tf.DType | None:
    """Return what tells values apart that travel together: None of slices."""
    is_sparse = isinstance(value, tf.IndexedSlices)
    return None if is_sparse else tf.as_dtype(value.dtype)
