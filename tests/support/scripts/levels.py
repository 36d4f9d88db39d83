"""Compares exchanges between all workers at once and in two levels.

levels.py STEPS
"""

import sys

import tensorflow as tf
from real_workers import report
from scripts import transport

import tf_optimizers as tfo
from tf_optimizers.workers.collectives import launcher

GATHERED = [2, 3]


def gathers(strategy):
    """Return the values that replicas gather, and the number of collectives."""

    def replica():
        context = tf.distribute.get_replica_context()
        place = context.replica_id_in_sync_group
        return context.all_gather(tf.fill(GATHERED, place), axis=0)

    step = tf.function(lambda: strategy.run(replica))
    parts = strategy.experimental_local_results(step())
    count = transport.collectives_in(step.get_concrete_function().graph)
    return [part.numpy().tolist() for part in parts], count


def sums(strategy):
    """Return whether a large sum over all replicas is right."""
    numbers = tf.range(1000, dtype=tf.float32)

    def replica():
        context = tf.distribute.get_replica_context()
        place = tf.cast(context.replica_id_in_sync_group, tf.float32)
        return context.all_reduce("SUM", tf.tile(numbers + place, [100]))

    (total,) = strategy.experimental_local_results(strategy.run(replica))
    count = strategy.num_replicas_in_sync
    expected = numbers * count + count * (count - 1) / 2
    return bool(tf.reduce_all(total == tf.tile(expected, [100])))


def observe(fewest, steps):
    """Return the results if `fewest` replicas exchange in two levels."""
    launcher.FEWEST_IN_LEVELS = fewest
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    gathered, collectives = gathers(strategy)
    return {
        "gathered": gathered,
        "collectives": collectives,
        "is_sum": sums(strategy),
        "weights": transport.train(strategy, steps),
    }


if __name__ == "__main__":
    report([observe(fewest, int(sys.argv[1])) for fewest in (1000, 4)])
