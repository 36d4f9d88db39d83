"""Sends gradients to owners, and their new weights to all replicas."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.agreement.workers import is_sparse_multi_worker
from tf_optimizers.base.replicas import own_component


class Merged:
    """The exchange of replicas of one process, as `MirroredStrategy` has."""

    def sum_at_owners(
        self, values: Sequence[tf.Tensor], owners: Sequence[int]
    ) -> list[tf.Tensor]:
        """Return the sums over replicas; those of others mean nothing."""

        def merged(strategy: Any, values: Any) -> list[tf.Tensor]:
            devices = strategy.extended.worker_devices
            sums = strategy.extended.batch_reduce_to(
                tf.distribute.ReduceOp.SUM,
                [
                    (value, devices[owner])
                    for value, owner in zip(values, owners, strict=True)
                ],
            )
            return [strategy.experimental_local_results(s)[0] for s in sums]

        return _merge_call(merged, list(values))

    def spread(
        self, variables: Sequence[tf.Variable], owners: Sequence[int]
    ) -> None:
        """Assign the owners' values of variables on all replicas."""

        def merged(strategy: Any, values: Any) -> None:
            for variable, value, owner in zip(
                variables, values, owners, strict=True
            ):
                chosen = strategy.experimental_local_results(value)[owner]
                strategy.extended.update(
                    variable, _assign, args=(chosen,), group=False
                )

        _merge_call(merged, [own_component(v).read_value() for v in variables])


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
            longest = self._longest(parts, values)
            rows = [_row([values[i] for i in part], longest) for part in parts]
            dtype = values[group[0]].dtype
            words = extended.all_to_all(_as_words(_stack(rows, dtype, longest)))
            received = _from_words(words, dtype)
            # In the order of ranks.
            total = tf.add_n(tf.unstack(received, num=self._replicas))
            own = parts[_rank()]
            for i, value in zip(own, _split(total, values, own), strict=True):
                sums[i] = value
        return sums

    def spread(
        self, variables: Sequence[tf.Variable], owners: Sequence[int]
    ) -> None:
        """Assign the owners' values of variables on all replicas."""
        extended = tf.distribute.get_strategy().extended
        weights = [own_component(variable) for variable in variables]
        for group in _by_dtype(weights):
            parts = self._parts(group, owners)
            longest = self._longest(parts, weights)
            dtype = weights[group[0]].dtype
            row = _row([weights[i] for i in parts[_rank()]], longest)
            words = extended.in_replica(
                extended.channel.all_gather,
                _as_words(_stack([row], dtype, longest)),
            )
            rows = _from_words(words, dtype)
            for rank, part in enumerate(parts):
                if rank != _rank():
                    news = _split(rows[rank], weights, part)
                    for i, new in zip(part, news, strict=True):
                        weights[i].assign(new)

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
        return longest + longest % 2


def exchange_of(strategy: tf.distribute.Strategy) -> Merged | AllToAll:
    """Return the exchange that a strategy's replicas can make."""
    if is_sparse_multi_worker(strategy):
        return AllToAll(strategy.num_replicas_in_sync)
    return Merged()


def total_squares(values: Iterable[tf.Tensor]) -> tf.Tensor:
    """Return the sum of squares of what all replicas have of some values."""
    own = [tf.reduce_sum(tf.square(tf.cast(v, tf.float32))) for v in values]
    return tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, tf.add_n([tf.constant(0.0), *own])
    )


def _merge_call(merged: Any, values: list[tf.Tensor]) -> Any:
    context = tf.distribute.get_replica_context()
    return context.merge_call(merged, args=(values,))


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    variable.assign(value)


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


def _row(values: Sequence[Any], length: int) -> tf.Tensor | None:
    """Return values one after another, filled up; None without any."""
    if not values:
        return None
    flat = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
    return tf.pad(flat, [[0, length - sum(map(_size, values))]])


def _stack(
    rows: Sequence[tf.Tensor | None], dtype: tf.DType, length: int
) -> tf.Tensor:
    empty = tf.zeros([length], dtype)
    return tf.stack([empty if row is None else row for row in rows])


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
