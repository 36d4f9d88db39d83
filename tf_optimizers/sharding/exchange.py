"""Sends gradients to owners, and their new weights to all replicas."""

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.agreement.workers import is_sparse_multi_worker


class Merged:
    """The exchange of replicas of one process, as `MirroredStrategy` has."""

    def sum_at_owners(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return the sums over replicas; those of others mean nothing."""

        def merged(strategy: Any, values: Any) -> list[tf.Tensor]:
            devices = strategy.extended.worker_devices
            # One by one: several together are summed on all devices.
            sums = [
                strategy.extended.reduce_to(
                    tf.distribute.ReduceOp.SUM, value, devices[owner]
                )
                for value, owner in zip(values, owners, strict=True)
            ]
            return [strategy.experimental_local_results(s)[0] for s in sums]

        return _merge_call(merged, list(values))

    def gather(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return what the owners have of values that all replicas have."""

        def merged(strategy: Any, values: Any) -> list[tf.Tensor]:
            return [
                strategy.experimental_local_results(value)[owner]
                for value, owner in zip(values, owners, strict=True)
            ]

        return _merge_call(merged, list(values))


class AllToAll:
    """The exchange under `SparseMultiWorkerMirroredStrategy`.

    Each replica has a row of what it owns, filled up to the longest:

        replica 0   [a b | c .]   ─ all-to-all ─▶   0: sums of a b
        replica 1   [a b | c .]                   1: sums of c .

    and all-gathers its row of new weights. There is one message each way for
    every dtype.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def sum_at_owners(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return the sums over replicas; those of others mean nothing."""
        extended = tf.distribute.get_strategy().extended
        sums = list(values)
        for group in _by_dtype(values):
            parts = self._parts(group, owners)
            dtype = values[group[0]].dtype
            rows = _rows(parts, values, self._longest(parts, values), dtype)
            received = _from_words(extended.all_to_all(_as_words(rows)), dtype)
            # In the order of ranks.
            total = tf.add_n(tf.unstack(received, num=self._replicas))
            own = parts[_rank()]
            for i, value in zip(own, _split(total, values, own), strict=True):
                sums[i] = value
        return sums

    def gather(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return what the owners have of values that all replicas have."""
        extended = tf.distribute.get_strategy().extended
        news = list(values)
        for group in _by_dtype(values):
            parts = self._parts(group, owners)
            longest = self._longest(parts, values)
            dtype = values[group[0]].dtype
            row = _rows([parts[_rank()]], values, longest, dtype)
            words = extended.in_replica(
                extended.channel.all_gather, _as_words(row)
            )
            rows = _from_words(words, dtype)
            for rank, part in enumerate(parts):
                split = _split(rows[rank], values, part)
                for i, new in zip(part, split, strict=True):
                    news[i] = new
        return news

    def _parts(
        self, group: Sequence[int], owners: Sequence[int]
    ) -> list[list[int]]:
        """Return what each replica owns of a group."""
        return [
            [i for i in group if owners[i] == rank]
            for rank in range(self._replicas)
        ]

    def _longest(self, parts: list[list[int]], values: Sequence[Any]) -> int:
        """Return the length of the rows, in whole words of 32 bits."""
        longest = max(sum(_size(values[i]) for i in part) for part in parts)
        is_half = any(values[i].dtype.size == 2 for part in parts for i in part)
        return longest + (longest % 2 if is_half else 0)


def exchange_of(strategy: tf.distribute.Strategy) -> Merged | AllToAll:
    """Return the exchange that a strategy's replicas can make."""
    if is_sparse_multi_worker(strategy):
        return AllToAll(strategy.num_replicas_in_sync)
    return Merged()


def total_squares(
    values: Sequence[tf.Tensor], groups: Sequence[int], count: int
) -> tf.Tensor:
    """Return sums of squares of what all replicas have, by group.

    Args:
        values: What this replica has.
        groups: The group of each, less than `count`.
        count: How many groups there are.
    """
    squares = [tf.reduce_sum(tf.square(tf.cast(v, tf.float32))) for v in values]
    own = tf.math.unsorted_segment_sum(
        tf.stack([*squares, tf.constant(0.0)]), [*groups, 0], count
    )
    return tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, own
    )


def _merge_call(merged: Any, values: list[tf.Tensor]) -> Any:
    context = tf.distribute.get_replica_context()
    return context.merge_call(merged, args=(values,))


def _rank() -> int:
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def _by_dtype(values: Sequence[Any]) -> list[list[int]]:
    """Return the positions of the values of each dtype, but empty ones."""
    groups: dict[tf.DType, list[int]] = {}
    for i, value in enumerate(values):
        if _size(value):
            groups.setdefault(value.dtype, []).append(i)
    return list(groups.values())


def _size(value: Any) -> int:
    return value.shape.num_elements()


def _rows(
    parts: Sequence[Sequence[int]],
    values: Sequence[tf.Tensor],
    length: int,
    dtype: tf.DType,
) -> tf.Tensor:
    """Return rows of values one after another, filled up, in one copy."""
    flat = []
    for part in parts:
        flat += [tf.reshape(values[i], [-1]) for i in part]
        gap = length - sum(_size(values[i]) for i in part)
        if gap:
            flat.append(tf.zeros([gap], dtype))
    joined = tf.concat(flat, 0) if len(flat) > 1 else flat[0]
    return tf.reshape(joined, [len(parts), length])


def _split(
    row: tf.Tensor, values: Sequence[Any], part: Sequence[int]
) -> list[tf.Tensor]:
    """Return the values of a row, in their shapes."""
    ends = itertools.accumulate((_size(values[i]) for i in part), initial=0)
    return [
        tf.reshape(row[start:end], values[i].shape)
        for i, (start, end) in zip(part, itertools.pairwise(ends), strict=True)
    ]


def _as_words(rows: tf.Tensor) -> tf.Tensor:
    """Return rows as what collectives carry: they know no bfloat16."""
    if rows.dtype.size != 2:
        return rows
    return tf.bitcast(
        tf.reshape(rows, [rows.shape[0], rows.shape[1] // 2, 2]), tf.int32
    )


def _from_words(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.size != 2:
        return words
    return tf.reshape(
        tf.bitcast(words, dtype), [tf.shape(words)[0], 2 * words.shape[1]]
    )
