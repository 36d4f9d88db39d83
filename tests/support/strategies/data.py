"""Data: the rows of each replica, and their order."""

import functools
import itertools

import tensorflow as tf
from local import per_replica
from strategies.table import Table

TABLE = Table()


def batches(rows, size, drop_remainder=False, policy="AUTO"):
    data = tf.data.Dataset.range(rows).batch(size, drop_remainder)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        tf.data.experimental.AutoShardPolicy, policy
    )
    return data.with_options(options)


def seen(strategy, data):
    """Return the rows that each replica gets, by batch."""
    replicas = (strategy.run(lambda v: v, (batch,)) for batch in data)
    return list(map(strategy.experimental_local_results, replicas))


def signature(data):
    """Return the element spec as text; check that functions accept it."""
    tf.function(lambda batch: None, [data.element_spec])(next(iter(data)))
    return repr(data.element_spec).partition("Spec(")[2]


def distributed(strategy, data):
    return seen(strategy, strategy.experimental_distribute_dataset(data))


def _add_shares():
    """Add cases whose last batch is full, smaller, or too small to split."""
    for (rows, size), drop, policy in itertools.product(
        [(8, 4), (11, 4), (9, 4), (7, 3), (1, 4), (0, 4)],
        (False, True),
        ("AUTO", "DATA", "OFF"),
    ):
        data = functools.partial(batches, rows, size, drop, policy)
        TABLE.add(
            f"{rows} rows by {size}, drop={drop}, {policy}",
            lambda s, other, data=data: distributed(s, data()),
        )


_add_shares()
TABLE.add(
    "files where there are none",
    lambda s, other: distributed(s, batches(8, 4, policy="FILE")),
    error="NotFoundError",
)


@TABLE.behaviour
def nested_elements(strategy):
    data = tf.data.Dataset.range(7).map(
        lambda i: {"x": tf.cast(i, "float32"), "y": (i, tf.as_string(i))}
    )
    return [*strategy.experimental_distribute_dataset(data.batch(4))]


@TABLE.behaviour
def shuffled_by_a_seed(strategy):
    data = tf.data.Dataset.range(12).shuffle(12, seed=3).batch(4)
    shared = strategy.experimental_distribute_dataset(data)
    return [seen(strategy, shared) for _ in range(2)]


@TABLE.behaviour
def of_unknown_length(strategy):
    data = tf.data.Dataset.range(11).filter(lambda i: i % 3 > 0).batch(3)
    return distributed(strategy, data.prefetch(1).repeat(2))


@TABLE.behaviour
def spec_and_cardinality(strategy):
    data = strategy.experimental_distribute_dataset(batches(11, 4))
    return [signature(data), int(data.cardinality)]


@TABLE.behaviour
def iterated_in_a_function(strategy):
    data = strategy.experimental_distribute_dataset(batches(11, 4))

    @tf.function
    def epoch():
        total = tf.constant(0, tf.int64)
        for batch in data:
            total += strategy.reduce(
                "SUM", strategy.run(tf.reduce_sum, (batch,)), None
            )
        return total

    return [epoch(), epoch()]


@TABLE.behaviour
def stepped_by_hand(strategy):
    data = iter(strategy.experimental_distribute_dataset(batches(6, 4)))
    step = tf.function(lambda: strategy.run(lambda v: v + 1, (next(data),)))
    return [step(), next(data), data.get_next_as_optional().has_value()]


def _iterated_beyond_its_end(strategy, other):
    data = iter(strategy.experimental_distribute_dataset(batches(4, 4)))
    return [next(data), next(data)]


TABLE.add(
    "iterated beyond its end", _iterated_beyond_its_end, error="StopIteration"
)


@TABLE.behaviour
def from_function(strategy):
    def make(context):
        size = context.get_per_replica_batch_size(6)
        data = batches(12, size).map(lambda v: v + context.input_pipeline_id)
        return data.shard(
            context.num_input_pipelines, context.input_pipeline_id
        )

    data = strategy.distribute_datasets_from_function(make)
    return [seen(strategy, data), signature(data)]


def _rows_that_do_not_divide(strategy, other):
    return strategy.distribute_datasets_from_function(
        lambda context: batches(8, context.get_per_replica_batch_size(3))
    )


TABLE.add(
    "rows that do not divide", _rows_that_do_not_divide, error="ValueError"
)


@TABLE.behaviour
def options_of_input(strategy):
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_per_replica_buffer_size=2,
    )
    return seen(
        strategy,
        strategy.experimental_distribute_dataset(batches(9, 4), options),
    )


def _pipeline_for_each_replica(strategy, other):
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=(
            tf.distribute.InputReplicationMode.PER_REPLICA
        ),
    )
    return seen(
        strategy,
        strategy.distribute_datasets_from_function(
            lambda context: batches(4, 2), options
        ),
    )


TABLE.add(
    "pipeline for each replica",
    _pipeline_for_each_replica,
    error="NotImplementedError",
)


@TABLE.behaviour
def values_from_function(strategy):
    makes = [
        lambda i: tf.constant([i]),
        lambda i: tf.constant([f"replica {i}"]),
        lambda i: {"a": tf.constant(i), "b": [tf.constant(1.0)]},
        lambda i: i,
    ]
    return [per_replica(strategy, make) for make in makes]


@TABLE.behaviour
def local_results(strategy):
    local = strategy.experimental_local_results
    value = per_replica(strategy, lambda i: tf.constant([i]))
    return [local(value), local(tf.constant(1)), local(2)]
