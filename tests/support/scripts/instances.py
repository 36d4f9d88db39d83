"""Collectives of workers that trace differently, and wait for each other."""

import itertools
import time

import numpy as np
import tensorflow as tf
from real_workers import report

import tf_optimizers as tfo

STEPS = 60
SHAPES = {"int32": [2, 5], "float32": [1, 2, 2], "float16": [200_000]}
DTYPES = ("float16", "float32", "float64", "int32", "int64")


def context():
    return tf.distribute.get_replica_context()


def total(tensor):
    return context().all_reduce("SUM", tensor)


@tf.function(autograph=False)
def nested(x, rows):
    """Return the sum of `x`; each number of `rows` is traced separately."""
    return total(x) + 0 * tf.reduce_sum(rows)


def replica(x, rows):
    """Return sums that could be confused: their sizes and dtypes are equal."""
    summed = total(x) + nested(x, rows) + nested(x + 1, rows[:1])
    chosen = tf.cond(
        x[0] > 1,
        lambda: total(x) + total(x + 2),
        lambda: total(x + 3) + nested(x, rows),
    )
    _, looped = tf.while_loop(
        lambda i, _: i < 3,
        lambda i, v: (i + 1, v + total(x + tf.cast(i, x.dtype))),
        [0, tf.zeros_like(x)],
    )
    return tf.stack([summed, chosen, looped])


def expected(x, workers):
    chosen = 2 * x + 2 if x > 1 else 2 * x + 3
    return [workers * value for value in (3 * x + 1, chosen, 3 * x + 3)]


def sum_often(strategy, rank):
    """Return the number of wrong sums, and the number of traces."""
    workers, wrong = strategy.num_replicas_in_sync, 0
    step = tf.function(
        lambda *args: strategy.run(replica, args), autograph=False
    )
    for i in range(STEPS):
        # Only the second worker sees batches of other sizes.
        rows = tf.ones([1 + i % 3 if rank == 1 else 1])
        if (i // 10) % workers == rank:
            time.sleep(0.01)
        x = float(i % 4)
        sums = strategy.experimental_local_results(step(tf.fill([4], x), rows))
        wrong += not np.all(sums[0][:, 0] == expected(x, workers))
    return wrong, step.experimental_get_tracing_count()


def gather_all(strategy, rank):
    """Return the cases whose gather does not return all parts in order."""
    workers = strategy.num_replicas_in_sync
    collectives = strategy.extended._cross_device_ops
    wrong = []
    for dtype, shape in (*((d, [3]) for d in DTYPES), *SHAPES.items()):
        parts = np.arange(workers * np.prod(shape)).reshape(-1, *shape[1:])
        parts = tf.cast(parts % 251, dtype)
        part = tf.split(parts, workers)[rank]
        for known in (part.shape, [None, *shape[1:]]):
            gather = tf.function(
                lambda part: strategy.run(
                    lambda: collectives.all_gather(part, 0, None)
                ),
                input_signature=[tf.TensorSpec(known, dtype)],
                autograph=False,
            )
            if not np.array_equal(gather(part), parts):
                wrong.append((dtype, shape, known))
    return wrong


def sum_large(strategy, rank):
    """Return the cases whose sum is not that of `tf.add_n`."""
    workers, wrong = strategy.num_replicas_in_sync, []
    for dtype, size in itertools.product(DTYPES, (1, 2, 200_003)):
        parts = np.random.default_rng(size).standard_normal((workers, size))
        parts = tf.cast(100 * parts, dtype)
        for known in ([size], [None]):
            add = tf.function(
                lambda part: strategy.run(lambda: total(part)),
                input_signature=[tf.TensorSpec(known, dtype)],
                autograph=False,
            )
            found = strategy.experimental_local_results(add(parts[rank]))[0]
            if not np.array_equal(found, tf.add_n(tf.unstack(parts))):
                wrong.append((dtype, size, known))
    return wrong


def sum_unequal(strategy, rank):
    """Return the error, and its time, of a sum of different batch sizes.

    When it occurs, sums for both sizes have been traced.
    """
    add = tf.function(lambda x: strategy.run(lambda: total(x)), autograph=False)
    sums = [
        strategy.experimental_local_results(add(tf.ones([size])))[0]
        for size in (5, 6)
    ]
    assert all(np.all(each == strategy.num_replicas_in_sync) for each in sums)
    start = time.monotonic()
    try:
        add(tf.ones([5 + rank % 2]))
    except tf.errors.OpError as error:
        return [time.monotonic() - start, str(error)]


def main():
    """Report all errors."""
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    wrong, traces = sum_often(strategy, rank)
    report(
        {
            "wrong sums": wrong,
            "traces": traces,
            "wrong gathers": gather_all(strategy, rank),
            "wrong large sums": sum_large(strategy, rank),
            "unequal sum": sum_unequal(strategy, rank),
        }
    )


if __name__ == "__main__":
    main()
