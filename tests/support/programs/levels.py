"""What replicas exchange, in one level and in two."""

import tensorflow as tf
from programs import transport
from real_workers import report

import tf_optimizers as tfo
from tf_optimizers._compat import launcher

GATHERED = [2, 3]


def gathers(strategy):
    """Return what all have gathered, and the collectives of that."""

    def replica():
        context = tf.distribute.get_replica_context()
        place = context.replica_id_in_sync_group
        return context.all_gather(tf.fill(GATHERED, place), axis=0)

    step = tf.function(lambda: strategy.run(replica))
    parts = strategy.experimental_local_results(step())
    count = transport.collectives_in(step.get_concrete_function().graph)
    return [part.numpy().tolist() for part in parts], count


def observe(fewest):
    """Return what comes of it if so many replicas go in two levels."""
    launcher.FEWEST_IN_LEVELS = fewest
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    gathered, collectives = gathers(strategy)
    return {
        "gathered": gathered,
        "collectives": collectives,
        "weights": transport.train(strategy, 20),
    }


if __name__ == "__main__":
    report([observe(fewest) for fewest in (1000, 4)])
