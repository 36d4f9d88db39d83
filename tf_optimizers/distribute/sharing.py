"""What each worker draws from: its replicas' parts of batches, with notes."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.look_ahead import dataset_of, look_ahead
from tf_optimizers.distribute import drawn
from tf_optimizers.distribute.drawn import Comparison
from tf_optimizers.distribute.notes import note_next
from tf_optimizers.distribute.parts import rows_in, split
from tf_optimizers.distribute.shared_data import (
    agree_on_data,
    in_one_order,
    is_shared,
)

# Its methods, where the strategy's own call these functions.
_TensorFlows = tf.distribute.Strategy


def distribute_dataset(strategy: Any, dataset: Any, options: Any) -> Any:
    """Share the batches of a data set among all replicas."""
    if not _is_counted(strategy):
        return _TensorFlows.experimental_distribute_dataset(
            strategy, dataset, options
        )
    if not is_shared(dataset):
        distributed = _TensorFlows.experimental_distribute_dataset(
            strategy, dataset, options
        )
        own = dataset_of(distributed)
        return _distribute_own(
            strategy, lambda _: own, distributed.cardinality, options
        )
    extended, batches = strategy.extended, _count(dataset)
    _agree(strategy, dataset, batches)
    is_compared = strategy.compares_data and extended.workers > 1
    comparison = Comparison.ALL if is_compared else Comparison.NOT
    # TensorFlow's worker 0 has the first, and every so manieth, replica.
    places = range(extended.worker_index, extended.replicas, extended.workers)
    distributed = _TensorFlows.distribute_datasets_from_function(
        strategy,
        lambda _: share_out(
            in_one_order(dataset), places, extended.replicas, comparison
        ),
        options,
    )
    return look_ahead(distributed, batches)


def distribute_from_function(
    strategy: Any, dataset_fn: Callable, options: Any
) -> Any:
    """Distribute data that every worker creates for itself."""
    if not _is_counted(strategy):
        return _TensorFlows.distribute_datasets_from_function(
            strategy, dataset_fn, options
        )
    return _distribute_own(strategy, dataset_fn, None, options)


def _distribute_own(
    strategy: Any, make: Callable, batches: int | None, options: Any
) -> Any:
    replicas = len(strategy.extended.worker_devices)
    made = []

    def make_with_notes(context: Any) -> tf.data.Dataset:
        made.append(make(context))
        made.append(keep(made[0], replicas, is_endless=True))
        return keep(made[0], replicas)

    distributed = _TensorFlows.distribute_datasets_from_function(
        strategy, make_with_notes, options
    )
    own, endless = made
    if batches is None:
        elements = _count(own)
        batches = -(-elements // replicas) if elements > 0 else elements
    _agree(strategy, None, batches)
    return look_ahead(distributed, batches, endless)


def _is_counted(strategy: Any) -> bool:
    """Tell whether replicas must know each other's rows."""
    return (
        strategy.num_replicas_in_sync > 1
        and tf.compat.v1.executing_eagerly_outside_functions()
    )


def _count(dataset: tf.data.Dataset) -> int:
    if tf.executing_eagerly():
        return int(dataset.cardinality())
    return tf.data.UNKNOWN_CARDINALITY


def _agree(strategy: Any, dataset: Any, batches: Any) -> None:
    if strategy.extended.workers > 1 and tf.executing_eagerly():
        agree_on_data(strategy, dataset, batches)


def share_out(
    dataset: tf.data.Dataset,
    places: range,
    replicas: int,
    comparison: Comparison,
) -> tf.data.Dataset:
    """Return some replicas' parts of a data set's batches, in turn.

    Args:
        dataset: Of global batches, the same on all workers.
        places: Of the replicas of this worker, among all.
        replicas: The number of all.
        comparison: How what workers draw is compared.
    """

    @tf.autograph.experimental.do_not_convert
    def parts_of(number: tf.Tensor, batch: Any) -> Any:
        seen = drawn.digests(batch, number) if comparison else None
        parts = tuple(
            (part, drawn.note(rows, comparison, seen))
            for part, rows in split(batch, places, replicas)
        )
        return parts if len(parts) > 1 else parts[0]

    @tf.autograph.experimental.do_not_convert
    def in_turn(*parts: Any) -> tf.data.Dataset:
        first, *others = map(tf.data.Dataset.from_tensors, parts)
        for other in others:
            first = first.concatenate(other)
        return first

    parts = dataset.enumerate().map(parts_of)
    if len(places) > 1:
        parts = parts.flat_map(in_turn)
    return note_next(
        parts.prefetch(len(places)), len(places), drawn.end(comparison)
    )


def keep(
    dataset: tf.data.Dataset, replicas: int, is_endless: bool = False
) -> tf.data.Dataset:
    """Return the elements of a data set, which replicas here take in turn."""
    spec = dataset.element_spec

    @tf.autograph.experimental.do_not_convert
    def add_note(*parts: Any) -> Any:
        element = parts if isinstance(spec, tuple) else parts[0]
        counts = map(rows_in, tf.nest.flatten(element))
        rows: Any = next((n for n in counts if n is not None), 0)
        return element, drawn.note(rows, Comparison.NOT)

    return note_next(dataset.map(add_note), replicas, drawn.end(Comparison.NOT))
