"""All `IndexedSlices` of a call in one all-gather.

    worker 0                          worker 1
    a: 2 entries, b: 1 row            a: 2 entries, b: 3 rows
        │ pack: as 32-bit words, rows padded
        ▼                                 ▼
    [a b.values b.indices]            one int32 buffer each
        └───────────── all-gather ────────┘
        ▼ unpack: the same on both
    a: 4 entries, b: 4 rows, those of worker 0 first

Padding needs to know the rows of everybody. They travel ahead, all in one
small all-gather, unless all slices are `SortedEntries`. `DealtEntries` are
summed by their owners first; see reduce_scatter.py.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.collectives import CollectiveAllReduceHooks
from tf_optimizers._compat.replicas import in_xla
from tf_optimizers.distribute.entries import (
    SortedEntries,
    narrow_indices,
    pack_entries,
    unpack_entries,
)
from tf_optimizers.distribute.reduce_scatter import (
    DealtEntries,
    kept_sums,
    pack_rows,
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
        """Reduce a nest of tensors and `IndexedSlices` over all replicas.

        Raises:
            RuntimeError: If it will be compiled by XLA.
        """
        if self.replicas == 1:
            return value
        if in_xla():
            # It compiles for one device, and knows no collectives of CPUs.
            raise RuntimeError(
                "`SparseMultiWorkerMirroredStrategy` cannot exchange values "
                "under XLA. Received: a step that is compiled by XLA. Pass "
                "`jit_compile=False` to `compile` or `tf.function`."
            )
        values = tf.nest.flatten(value)
        results = list(values)
        for positions in _groups(values):
            group = [values[i] for i in positions]
            if isinstance(group[0], tf.IndexedSlices):
                reduced = self._reduce_slices(
                    reduce_op, group, replica_id, options
                )
            else:
                reduced = self.all_reduce_dense(
                    reduce_op, group, replica_id, options
                )
            for position, result in zip(positions, reduced, strict=True):
                results[position] = result
        return tf.nest.pack_sequence_as(value, results)

    def _reduce_slices(
        self,
        reduce_op: Any,
        slices: Sequence[tf.IndexedSlices],
        replica_id: int,
        options: Any,
    ) -> list[tf.IndexedSlices]:
        with tf.device(self.device(replica_id)):
            slices = [
                self._sum_dealt(s, replica_id, options)
                if isinstance(s, DealtEntries)
                else s
                for s in slices
            ]
            rows = self._gather_rows(slices, replica_id, options)
            gathered = self.all_gather(pack(slices, rows), replica_id, options)
            results = unpack(gathered, slices, rows, self.replicas)
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                results = [_divide(s, self.replicas) for s in results]
            return results

    def _sum_dealt(
        self, dealt: DealtEntries, replica_id: int, options: Any
    ) -> SortedEntries:
        """Exchange entries with their owners; return the sums of this one."""
        rows = self.all_to_all(pack_rows(dealt), replica_id, options)
        return kept_sums(rows, dealt)

    def _gather_rows(
        self, slices: Sequence[tf.IndexedSlices], replica_id: int, options: Any
    ) -> list[tf.Tensor]:
        """Return the rows by replica of all slices that may differ in them."""
        _, uneven = _by_kind(slices)
        if not uneven:
            return []
        local = tf.stack([tf.shape(s.indices)[0] for s in uneven])
        every = self.all_gather(local[tf.newaxis], replica_id, options)
        return tf.unstack(every, num=len(uneven), axis=1)


def pack(
    slices: Sequence[tf.IndexedSlices], rows: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Return values and indices as int32 words, padded to the most rows."""
    entries, uneven = _by_kind(slices)
    words = pack_entries(entries) if entries else []
    words += [
        to_words(pad_rows(tensor, _most(counts)))
        for part, counts in zip(uneven, rows, strict=True)
        for tensor in (part.values, narrow_indices(part))
    ]
    return tf.concat(words, 0)


def unpack(
    gathered: tf.Tensor,
    slices: Sequence[tf.IndexedSlices],
    rows: Sequence[tf.Tensor],
    replicas: int,
) -> list[tf.IndexedSlices]:
    """Return the slices of all replicas, in their order.

    Args:
        gathered: int32 [replicas * words], as `pack` makes them.
        slices: This replica's, for dtypes and shapes.
        rows: By replica, of those that are not `SortedEntries`.
        replicas: Their number.
    """
    words = WordReader(tf.reshape(gathered, [replicas, -1]), replicas)
    entries, uneven = _by_kind(slices)
    even_results = iter(
        unpack_entries(words, entries, replicas) if entries else []
    )
    uneven_results = iter(
        [
            tf.IndexedSlices(
                _read(words, part.values, counts),
                tf.cast(
                    _read(words, narrow_indices(part), counts),
                    part.indices.dtype,
                ),
                part.dense_shape,
            )
            for part, counts in zip(uneven, rows, strict=True)
        ]
    )
    return [
        next(even_results if isinstance(s, SortedEntries) else uneven_results)
        for s in slices
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


def _by_kind(
    slices: Sequence[tf.IndexedSlices],
) -> tuple[list[SortedEntries], list[tf.IndexedSlices]]:
    """Part those with equally many rows on every replica from the rest."""
    entries = [s for s in slices if isinstance(s, SortedEntries)]
    return entries, [s for s in slices if not isinstance(s, SortedEntries)]


def _groups(values: Sequence[Any]) -> list[list[int]]:
    """Return the positions of what travels together: slices, each dtype."""
    groups: dict[Any, list[int]] = {}
    for position, value in enumerate(values):
        is_sparse = isinstance(value, tf.IndexedSlices)
        kind = "slices" if is_sparse else tf.as_dtype(value.dtype)
        groups.setdefault(kind, []).append(position)
    return list(groups.values())
