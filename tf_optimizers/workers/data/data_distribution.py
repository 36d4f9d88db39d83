"""Distributes data: gives each replica its part of every batch."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import plain_variable
from tf_optimizers.workers._compat.datasets import dataset_of
from tf_optimizers.workers._compat.distribution import regroup
from tf_optimizers.workers.collectives.runs import BackgroundCall
from tf_optimizers.workers.data import batch_digests
from tf_optimizers.workers.data.ahead_dataset import look_ahead
from tf_optimizers.workers.data.batch_digests import Comparison
from tf_optimizers.workers.data.batch_metadata import (
    RowCounts,
    has_rows,
    note_next,
    with_rows,
)
from tf_optimizers.workers.data.batch_splits import (
    counts_of_rows,
    fixed_rows,
    split,
)
from tf_optimizers.workers.data.epochs import EpochStart
from tf_optimizers.workers.data.generators import take_generator
from tf_optimizers.workers.data.look_ahead import after
from tf_optimizers.workers.data.order import (
    agree_on_data,
    in_one_order,
    is_shared,
)
from tf_optimizers.workers.data.shuffles import has_random_maps

# The strategy's methods call the functions below, which call the methods that
# the strategy overrides.
_Parent = tf.distribute.Strategy
# The longest wait for other workers in `report_failure`, in seconds.
_REPORTING_SECONDS = 10.0


def distribute_dataset(strategy: Any, dataset: Any, options: Any) -> Any:
    """Distribute a dataset of global batches to all replicas."""
    generator = take_generator()
    distribute = functools.partial(
        _Parent.experimental_distribute_dataset, strategy, dataset, options
    )
    if strategy.num_replicas_in_sync == 1:
        return distribute()
    if not is_shared(dataset):
        distributed = distribute()
        own = dataset_of(distributed)
        if distributed.cardinality == tf.data.UNKNOWN_CARDINALITY:
            # TensorFlow may add empty batches when it splits batches.
            own = own.filter(lambda *element: has_rows(element))
        return distribute_from_function(
            strategy, lambda _: own, options, distributed.cardinality
        )
    extended, batches = strategy.extended, _count(dataset)
    agree_on_data(strategy, dataset, batches)
    comparison = _comparison(strategy, dataset)
    distributed = _Parent.distribute_datasets_from_function(
        strategy,
        lambda _: split_batches(
            in_one_order(dataset),
            _places(extended),
            extended.replicas,
            comparison,
        ),
        options,
    )
    begin = EpochStart(strategy, dataset, generator)
    return look_ahead(distributed, batches, begin=begin)


def batch_of_arrays(args: Sequence[Any]) -> Any:
    """Return a step's argument if it is a batch of plain arrays, else None.

    `train_on_batch`, `test_on_batch` and `predict_on_batch` pass such batches.
    NumPy arrays are returned as tensors.

    Args:
        args: A sequence of one element, the argument of a Keras model's step.
    """
    distributed = tf.distribute.DistributedValues
    if any(isinstance(leaf, distributed) for leaf in tf.nest.flatten(args)):
        return None
    (batch,) = tf.nest.map_structure(as_tensor, args)
    return batch if counts_of_rows(batch) else None


def split_arrays(
    strategy: Any, batch: Any, seen: dict[int, tf.Variable]
) -> Any:
    """Split a batch of plain arrays, the same on all workers, among replicas.

    TensorFlow would give every replica the whole batch.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
        batch: The result of `batch_of_arrays`.
        seen: Variables, by the number of tensors in a batch. A variable
            contains the summary of the last batch with that many tensors,
            followed by the number of such batches.

    Raises:
        tf.errors.InvalidArgumentError: If workers find that batches differ; if
            another worker calls `report_failure`; or if the values of the batch
            have different numbers of rows, not all of them static. A
            `tf.function` raises the error when the function runs.
        ValueError: If values have different static numbers of rows.
    """
    extended = strategy.extended
    if are_compared(strategy):
        batch = _compared(extended, batch, seen)
    parts, own = zip(
        *split(batch, _places(extended), extended.replicas), strict=True
    )
    counts = tuple(tf.cast(rows, tf.int32) for rows in own)
    batch_rows = RowCounts(_rows_of_all(batch), counts)
    return with_rows(regroup(parts, always_wrap=True), batch_rows)


def are_compared(strategy: Any) -> bool:
    """Return whether workers compare the batches that they share."""
    return strategy.extended.workers > 1 and strategy.compares_data


def report_failure(strategy: Any) -> None:
    """Report that this worker cannot build a model or trace a step.

    Call this function only if the step gets a batch of plain arrays. Other
    workers may have traced the step, and may wait for this worker's note on the
    batch. When the note arrives, they raise an error.
    """
    if not are_compared(strategy):
        return
    extended = strategy.extended
    background = BackgroundCall(extended)

    def report() -> None:
        with tf.init_scope():
            note = tf.constant(batch_digests.end(Comparison.ROWS))
            extended.gather_notes(note)

    with contextlib.suppress(tf.errors.OpError):  # A worker may have died.
        # Call in a thread: if other workers do not wait, the call does not end.
        background.call(report)
        background.wait(_REPORTING_SECONDS)


def _compared(extended: Any, batch: Any, seen: dict[int, tf.Variable]) -> Any:
    """Return a batch that becomes available once workers have compared it."""
    tensors = list(filter(tf.is_tensor, tf.nest.flatten(batch)))
    size = len(tensors)
    with tf.device("CPU:0"):
        if size not in seen:
            with tf.init_scope():
                start = [*batch_digests.UNKNOWN, 0]  # 0 batches so far.
                seen[size] = plain_variable(start)
        last = seen[size].read_value()
        before, number = last[:-1], last[-1:]
        digests = batch_digests.digests(tensors, tf.cast(number[0], tf.int64))
        digests = batch_digests.with_form(digests, batch)
        rows, comparison = _rows_of_all(batch), Comparison.ROWS
        notes = extended.gather_notes(
            batch_digests.note(rows, comparison, digests)
        )
        known = batch_digests.summarize(notes, before)
        # If batches differ, leave `seen` unchanged, so that it stays equal on
        # all workers.
        is_same = known[2] == batch_digests.Verdict.SAME
        following = tf.concat([known, number + 1], 0)
        seen[size].assign(tf.where(is_same, following, last))
        check = batch_digests.check(known, *batch_digests.BY_HAND)
    return after(check, batch)


def as_tensor(value: Any) -> Any:
    """Return a NumPy array as a tensor, and other values unchanged."""
    return tf.constant(value) if isinstance(value, np.ndarray) else value


def _rows_of_all(batch: Any) -> tf.Tensor:
    return tf.cast(counts_of_rows(batch)[0], tf.int32)


def _places(extended: Any) -> range:
    """Return the places of this worker's replicas in a global batch.

    Keras concatenates predictions in this order: those of the first replica of
    every worker, then those of the second replica of every worker, and so on.
    `gather_rows`, which concatenates a step's arrays, uses the same order.
    """
    return range(extended.worker_index, extended.replicas, extended.workers)


def _comparison(strategy: Any, dataset: tf.data.Dataset) -> Comparison:
    if not are_compared(strategy):
        return Comparison.NOTHING
    return Comparison.ROWS if has_random_maps(dataset) else Comparison.ALL


def distribute_from_function(
    strategy: Any,
    dataset_fn: Callable,
    options: Any,
    batches: int | None = None,
) -> Any:
    """Distribute a dataset that each worker creates by calling `dataset_fn`.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
        dataset_fn: Called with a `tf.distribute.InputContext`.
        options: The `tf.distribute.InputOptions`, or None.
        batches: The number of batches. Defaults to `None`: compute it from this
            worker's dataset.
    """
    if strategy.num_replicas_in_sync == 1:
        return _Parent.distribute_datasets_from_function(
            strategy, dataset_fn, options
        )
    replicas = len(strategy.extended.worker_devices)
    made = []

    def make_with_notes(context: Any) -> tf.data.Dataset:
        own = dataset_fn(context)
        elements, count = _count(own), batches
        if count is None:
            count = -(-elements // replicas) if elements > 0 else elements
        # This worker's replicas take elements in turn, so the last batch may
        # have too few elements for all of them.
        may_lack = elements != tf.data.INFINITE_CARDINALITY and (
            elements < 0 or elements % replicas > 0
        )
        rows = None if may_lack else fixed_rows(own.element_spec)
        rows = rows and rows * replicas
        total = agree_on_data(strategy, None, count, rows)
        noted = functools.partial(
            with_notes, own, replicas, total, may_lack=may_lack
        )
        made.extend([count, noted(is_endless=True)])
        return noted()

    distributed = _Parent.distribute_datasets_from_function(
        strategy, make_with_notes, options
    )
    return look_ahead(distributed, *made)


def _count(dataset: tf.data.Dataset) -> int:
    if tf.executing_eagerly():
        return int(dataset.cardinality())
    return tf.data.UNKNOWN_CARDINALITY


def split_batches(
    dataset: tf.data.Dataset,
    places: range,
    replicas: int,
    comparison: Comparison,
) -> tf.data.Dataset:
    """Return a dataset of the parts that this worker's replicas take in turn.

    Args:
        dataset: A dataset of global batches, the same on all workers.
        places: The indices of the parts that this worker's replicas get.
        replicas: The number of replicas of all workers.
        comparison: How to compare the batches that workers draw.
    """

    def parts_of(number: tf.Tensor, batch: Any) -> Any:
        seen = batch_digests.digests(batch, number) if comparison else None
        total = _rows_of_all(batch) if comparison else None
        return [
            (part, batch_digests.note(rows, comparison, seen, total))
            for part, rows in split(batch, places, replicas)
        ]

    return note_next(
        dataset.enumerate().prefetch(1),
        parts_of,
        len(places),
        batch_digests.end(comparison, bool(comparison)),
    )


def with_notes(
    dataset: tf.data.Dataset,
    replicas: int,
    total: int | None = None,
    **options: bool,
) -> tf.data.Dataset:
    """Add notes to each element of a dataset; replicas take elements in turn.

    Args:
        dataset: This worker's dataset, which workers do not share.
        replicas: The number of replicas of this worker.
        total: The number of rows of a batch on all workers together; None if it
            varies or is unknown.
        **options: See `note_next`.
    """
    spec = dataset.element_spec

    def add_note(*parts: Any) -> Any:
        element = parts if isinstance(spec, tuple) else parts[0]
        rows = (counts_of_rows(element) or [1])[0]
        note = batch_digests.note(rows, Comparison.NOTHING, total=total)
        return [(element, note)]

    return note_next(
        dataset,
        add_note,
        replicas,
        batch_digests.end(Comparison.NOTHING, total is not None),
        **options,
    )
