"""Compressed optimizers on random gradients: `transport.py all STRATEGY...`.

`some` instead of `all` tries fewer dtypes and settings.
"""

import collections
import pathlib
import sys

import dgc
import keras
import numpy as np
import tensorflow as tf
from dgc import around
from real_workers import report

import tf_optimizers as tfo

SHAPES = {"kernel": (60, 50), "cube": (7, 8, 9), "bias": (5,)}
SETTINGS = {
    "sparsity": (0.9, 0.99),
    "rampup_begin_step": 3,
    "rampup_step": 10,
    "min_compress_size": 100,
    "clipnorm": 2.0,
}
STEPS, MANY = 60, 240  # Multiples of the length of a round.
DTYPES = {
    "some": ("float16", "int4"),
    "all": ("float16", "bfloat16", "int4", "int2"),
}
NOT_FINITE = {
    "some": ("float32", "int4"),
    "all": ("float32", *DTYPES["all"]),
}
MOST = (0.01,)  # So few zeros that even two replicas send dense tensors.
STRATEGIES = {
    "sparse": tfo.SparseMultiWorkerMirroredStrategy,
    "stock": tf.distribute.MultiWorkerMirroredStrategy,
}
# 210 and 35 entries: one is odd.
FEW = {"sparsity": (0.93,), "min_compress_size": 100}


ADAM = {"make": around(keras.optimizers.Adam, epsilon=0.1), "clipnorm": None}
# Inside SparseLoCo, plain SGD adds the gradients up.
PLAIN = {"make": around(keras.optimizers.SGD)}
HOSTED = ADAM | {"make": around(tfo.AdamOffload, epsilon=0.1)}


def make_gradients(strategy, step, drawn=None, parts=None):
    """Return the gradients of this worker's replicas at a step.

    If more gradients are drawn than there are replicas, each replica gets the
    sum of several. `parts` rounds them to multiples of 1 / parts.
    """
    replicas = strategy.num_replicas_in_sync
    drawn = dgc.make_gradients(step, SHAPES.values(), drawn or replicas)
    if parts:
        drawn = [[np.round(parts * g) / parts for g in own] for own in drawn]
    each = len(drawn) // replicas
    return [
        [sum(parts) for parts in zip(*drawn[i : i + each], strict=True)]
        for i in range(0, len(drawn), each)
    ]


def train(strategy, steps=STEPS, drawn=None, eager=False, **settings):
    """Return the weights after random steps."""
    rng = np.random.default_rng(7)
    values = {name: rng.standard_normal(s) for name, s in SHAPES.items()}
    run = dgc.Run(strategy, values, **SETTINGS | settings)
    for step in range(steps):
        run.step(make_gradients(strategy, step, drawn), eager)
    return [weight.tolist() for weight in run.weights()]


def train_mixed(strategy):
    """Return weights of several dtypes, and NumPy's; no value is rounded."""
    zeros = dgc.zeros(SHAPES)
    run = dgc.Run(
        *(strategy, zeros, 0.25, around(keras.optimizers.SGD)),
        dtypes={"cube": "float64", "bias": "float16"},
        sparsity=(0.0,),
        min_compress_size=100,
    )
    expected = list(zeros.values())
    for step in range(3):
        gradients = make_gradients(strategy, step, parts=64)
        run.step(gradients)
        for weight, *own in zip(expected, *gradients, strict=True):
            weight -= 0.25 * sum(own)
    return [
        [weight.astype("float64").tolist() for weight in weights]
        for weights in (run.weights(), expected)
    ]


def train_all(strategy, drawn=None, which="all"):
    """Return the weights after steps with various settings."""
    most = {"sparsity": MOST, "rampup_begin_step": 0}
    found = {
        "weights": train(strategy, drawn=drawn),
        # So many entries that they are sent as a dense tensor.
        "most": train(strategy, 20, drawn, **most),
        "rounds": train(strategy, 40, drawn, **ADAM, sync_every=4),
        "half": {
            dtype: train(strategy, 20, drawn, value_dtype=dtype)
            for dtype in DTYPES[which]
        },
    }
    if which == "all":
        found["eager"] = train(strategy, 6, drawn, eager=True)
        found["loco"] = train(strategy, 40, drawn, **ADAM)
    return found


def balance(strategy, steps=STEPS, **settings):
    """Return sums of all sent values, and of this worker's unsent and own ones.

    The result also says whether the worker's replicas are equal.
    """
    zeros = dgc.zeros(SHAPES)
    run = dgc.Run(strategy, zeros, 1.0, **FEW | settings)
    accumulated = [np.zeros(SHAPES[name]) for name in ("kernel", "cube")]
    for step in range(steps):
        run.step_and_add_up(make_gradients(strategy, step), accumulated)
    return balance_of(run, accumulated)


def balance_of(run, accumulated):
    """Return the sums of `balance` for the variables that are compressed."""
    memory = [run.memory("residual"), run.memory("momentum")]
    return {
        "sent": [(-weight).tolist() for weight in run.weights()[:2]],
        "unsent": [
            np.sum(each, axis=0, dtype="float64").tolist() for each in memory[0]
        ],
        "accumulated": [total.tolist() for total in accumulated],
        "equal": all(
            np.array_equal(part, parts[0])
            for each in memory
            for parts in each
            for part in parts
        ),
    }


def balances(strategy, which="all"):
    """Return `balance` with various settings."""
    many = MANY if which == "all" else STEPS
    found = {
        "plain": balance(strategy),
        "loco": balance(strategy, many, **PLAIN),
        "two bits": balance(strategy, many, value_dtype="int2"),
    }
    if which == "some":
        return found
    return found | {
        "rounds": balance(strategy, MANY, **PLAIN, sync_every=4),
        "rounded, not masked": balance(
            strategy, value_dtype="float16", momentum_masking=False
        ),
        "four bits": balance(strategy, MANY, value_dtype="int4"),
        "two bits, loco": balance(strategy, MANY, **PLAIN, value_dtype="int2"),
        # TensorFlow's own strategies send these as dense tensors.
        "two bits of most": balance(
            strategy, value_dtype="int2", sparsity=(0.25,)
        ),
    }


def are_equal(strategy, variables):
    """Return whether this worker's replicas have bitwise equal weights."""
    return all(
        np.array_equal(part, parts[0], equal_nan=True)
        for parts in (
            strategy.experimental_local_results(v.value) for v in variables
        )
        for part in parts
    )


def not_finite(strategy, **settings):
    """Return weights after a step with a NaN on one replica, inf on another."""
    settings = {"sparsity": (0.9,)} | settings
    run = dgc.Run(strategy, {"w": np.zeros(4000)}, 1.0, **settings)
    gradients = dgc.make_gradients(0, [4000], strategy.num_replicas_in_sync)
    gradients[0][0][17] = np.nan
    gradients[-1][0][1234] = np.inf
    run.step(gradients)
    return {
        "weights": run.weights()[0].tolist(),
        "equal": are_equal(strategy, run.variables),
        "finite": bool(np.isfinite(run.memory("residual")).all()),
    }


def count_bytes(strategy, **settings):
    """Return the bytes that this worker sends in a step and those it reports.

    Bytes and counts are by collective. Messages between the replicas of one
    worker are not counted.
    """
    zeros = dgc.zeros(SHAPES)
    run = dgc.Run(strategy, zeros, **FEW | settings)
    counts = collections.Counter()
    graph = run.graph(make_gradients(strategy, 0))
    for operation in graph.get_operations():
        if not operation.type.startswith("Collective"):
            continue
        if tf.get_static_value(operation.inputs[1]) == (
            strategy.num_replicas_in_sync
        ):
            buffer = operation.inputs[0]
            kind = kind_of(operation.type, operation.name)
            copies = buffer.shape[0] if kind != operation.type else 1
            size = buffer.shape.num_elements() * buffer.dtype.size
            counts[kind] += size // copies
    said = run.optimizer.communication_summary()["total"]["sent_bytes"]
    return {
        "said": len(run.replicas) * said,
        "sent": counts,
        "collectives": collectives_in(graph),
    }


def count_collectives(strategy, **settings):
    """Return the count of each collective in the graph of a step."""
    zeros = dgc.zeros(SHAPES)
    run = dgc.Run(strategy, zeros, min_compress_size=100, **settings)
    return collectives_in(run.graph(make_gradients(strategy, 0)))


def collectives_in(graph):
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    kinds = [
        kind_of(node.op, node.name)
        for node in nodes
        if node.op.startswith("Collective")
    ]
    return {kind: kinds.count(kind) for kind in set(kinds)}


def kind_of(op, name):
    """Return the type of a collective, such as "CollectiveGatherV2".

    A gather of all messages at once is an all-to-all in the graph.
    """
    return "CollectiveGatherV2" if "gather_at_once" in name else op


def average_statistics(strategy):
    """Assign different values on replicas; return the synchronized copies."""
    with strategy.scope():
        variable = keras.Variable(np.zeros(3), dtype="float32")
        optimizer = tfo.SparseLoCo(keras.optimizers.SGD(), sync_every=2)

    def replica():
        context = tf.distribute.get_replica_context()
        place = tf.cast(context.replica_id_in_sync_group, tf.float32)
        variable.assign(tf.fill([3], place))

    tf.function(lambda: strategy.run(replica))()
    optimizer.synchronize([variable])
    parts = strategy.experimental_local_results(variable.value)
    return [part.numpy().tolist() for part in parts]


def reduce_scalars(strategy):
    """Return the means of three logs, reduced as by Keras, and a sum."""

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


def observe(kind, which):
    """Return the results to compare for a kind of strategy."""
    strategy = STRATEGIES[kind]()
    result = train_all(strategy, which=which)
    threads = count_threads()
    result |= {
        "balance": balances(strategy, which),
        "not finite": {
            dtype: not_finite(strategy, value_dtype=dtype)
            for dtype in NOT_FINITE[which]
        },
        "new_threads": count_threads() - threads,
    }
    if kind == "sparse":
        # TensorFlow's own strategy packs tensors of one dtype only.
        result["mixed"] = train_mixed(strategy)
        result["logs"] = reduce_scalars(strategy)
        result["statistics"] = average_statistics(strategy)
        result["bytes"] = count_bytes(strategy)
        result["collectives"] = result["bytes"]["collectives"]
        inner = around(keras.optimizers.SGD)
        result["bytes outside of rounds"] = count_bytes(
            strategy, make=inner, sync_every=4
        )
        result["bytes of most"] = count_bytes(strategy, sparsity=MOST)
        result["bytes of few bits"] = {
            dtype: count_bytes(strategy, value_dtype=dtype)
            for dtype in DTYPES[which]
            if dtype.startswith("int")
        }
        if which == "all" and len(strategy.extended.worker_devices) == 1:
            result["hosted"] = train(strategy, 10, **HOSTED)
            result["unhosted"] = train(strategy, 10, **ADAM)
    else:
        result["collectives"] = count_collectives(strategy)
        result["collectives of most"] = count_collectives(
            strategy, sparsity=MOST
        )
    return result


def main():
    """Run under each of the strategies on the command line."""
    if sys.argv[1:] == ["golden"]:
        strategy, begin = STRATEGIES["sparse"](), 3
        report(dgc.golden("dgc_paddle_clip", strategy, begin).tolist())
    else:
        which, *kinds = sys.argv[1:]
        report({kind: observe(kind, which) for kind in kinds})


if __name__ == "__main__":
    main()
