"""DGCMomentum on random gradients: `transport.py STRATEGY`."""

import pathlib
import sys

import dgc
import numpy as np
import tensorflow as tf
from workers import report

import tf_optimizers as tfo

SHAPES = {"kernel": (60, 50), "cube": (7, 8, 9), "bias": (5,)}
SETTINGS = {
    "sparsity": (0.9, 0.99),
    "rampup_begin_step": 3,
    "rampup_step": 10,
    "min_compress_size": 100,
    "clipnorm": 2.0,
}
STEPS = 200
MOST = (0.25,)  # Of two replicas, of either transport.


def make_gradients(strategy, step):
    """Return what every replica of every worker has at a step."""
    return dgc.make_gradients(
        step, SHAPES.values(), strategy.num_replicas_in_sync
    )


def train(strategy, steps=STEPS, **settings):
    """Return the weights after random steps."""
    rng = np.random.default_rng(7)
    values = {name: rng.standard_normal(s) for name, s in SHAPES.items()}
    run = dgc.Run(strategy, values, **SETTINGS | settings)
    for step in range(steps):
        run.step(make_gradients(strategy, step))
    return [weight.tolist() for weight in run.weights()]


def train_half(strategy):
    """Return the weights after fewer steps, by the dtype of sent values."""
    return {
        dtype: train(strategy, 20, value_dtype=dtype)
        for dtype in ("float16", "bfloat16")
    }


def train_most(strategy):
    """Return the weights after sending so much that it is sent densely."""
    return train(strategy, 20, sparsity=MOST, rampup_begin_step=0)


def balance(strategy):
    """Return what all sent, and what this worker holds and accumulated."""
    zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    settings = {"sparsity": (0.9,), "min_compress_size": 100}
    run = dgc.Run(strategy, zeros, 1.0, **settings)
    names = [name for name in SHAPES if name != "bias"]  # It is dense.
    accumulated = [np.zeros(SHAPES[name]) for name in names]
    for step in range(STEPS):
        momentum = run.memory("momentum")
        gradients = make_gradients(strategy, step)
        run.step(gradients)
        for i, total in enumerate(accumulated):
            for local, replica in enumerate(run.replicas):
                u = momentum[i][local].astype("float64")
                total += 0.9 * u + gradients[replica][i]
    unsent = run.memory("residual")
    return {
        "sent": [(-weight).tolist() for weight in run.weights()[: len(names)]],
        "unsent": [
            np.sum(each, axis=0, dtype="float64").tolist() for each in unsent
        ],
        "accumulated": [total.tolist() for total in accumulated],
    }


def count_collectives(strategy, **settings):
    """Return how often each collective stands in the graph of a step."""
    zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    run = dgc.Run(strategy, zeros, min_compress_size=100, **settings)
    return collectives_in(run.graph(make_gradients(strategy, 0)))


def collectives_in(graph):
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    names = [node.op for node in nodes if node.op.startswith("Collective")]
    return {name: names.count(name) for name in set(names)}


def reduce_scalars(strategy):
    """Return what Keras makes of logs, and one of them summed."""

    def replica():
        place = tf.distribute.get_replica_context().replica_id_in_sync_group
        place = tf.cast(place, tf.float32)
        return place, 10 * place, tf.constant(7.0)

    @tf.function
    def logs():
        outputs = strategy.run(replica)
        means = [strategy.reduce("MEAN", log, axis=0) for log in outputs]
        return [*means, strategy.reduce("SUM", outputs[1], axis=None)]

    return {
        "values": [float(log) for log in logs()],
        "collectives": collectives_in(logs.get_concrete_function().graph),
    }


def count_threads():
    return len(list(pathlib.Path("/proc/self/task").iterdir()))


def main():
    """Run under the strategy that the command line names."""
    strategy = {
        "sparse": tfo.SparseMultiWorkerMirroredStrategy,
        "stock": tf.distribute.MultiWorkerMirroredStrategy,
    }[sys.argv[1]]()
    result = {
        "weights": train(strategy),
        "half": train_half(strategy),
        "most": train_most(strategy),
    }
    threads = count_threads()
    result |= {
        "balance": balance(strategy),
        "new_threads": count_threads() - threads,
        "collectives": count_collectives(strategy),
        "collectives of most": count_collectives(strategy, sparsity=MOST),
    }
    if sys.argv[1] == "sparse":
        result["logs"] = reduce_scalars(strategy)
    if strategy.num_replicas_in_sync == 4:
        result["golden"] = dgc.golden("dgc_paddle_clip", strategy).tolist()
    report(result)


if __name__ == "__main__":
    main()
