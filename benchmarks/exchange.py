"""What does a training step of several workers cost, with each exchange?

    python benchmarks/exchange.py [--workers 2] [--rounds 3] [--steps 20]

Every contender trains the same model on the same batches, in separate processes
on loopback; contenders take turns, round by round. Times are the first
worker's. Bytes are the kernel's count of the bytes that a worker's TCP sockets
send in a step, without packet headers. They are means over workers.
"""

import argparse
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import launched
import numpy as np
import results
import tables
import tensorflow as tf
import tqdm

import tf_optimizers as tfo
from tf_optimizers.demo.sockets import sent_bytes

BATCH = 32
WARM_UP = 5

# Depth and width of a stack of square layers without biases.
MODELS = {"4 M in 2 tensors": (2, 1414), "4 M in 100 tensors": (100, 200)}

STOCK = tf.distribute.MultiWorkerMirroredStrategy
OURS = tfo.SparseMultiWorkerMirroredStrategy
CONTENDERS = {
    "stock strategy, dense": (STOCK, "sgd"),
    "stock strategy, DGC at 0.1%": (STOCK, "dgc"),
    "ours, dense": (OURS, "sgd"),
    "ours, DGC at 0.1%": (OURS, "dgc"),
    "ours, DGC at 0.1%, float16": (OURS, "dgc, float16"),
    "ours, DGC at 0.1%, int4": (OURS, "dgc, int4"),
    "ours, DGC at 0.1%, int2": (OURS, "dgc, int2"),
    "no exchange": (None, "sgd"),
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "dgc": lambda: tfo.DGCMomentum(1e-3, momentum=0.9),
} | {
    f"dgc, {dtype}": functools.partial(
        tfo.DGCMomentum, 1e-3, momentum=0.9, value_dtype=dtype
    )
    for dtype in ("float16", "int4", "int2")
}


def make_step(
    strategy: tf.distribute.Strategy,
    make_optimizer: Callable,
    depth: int,
    width: int,
) -> tf.types.experimental.PolymorphicFunction:
    """Return a training step on a batch that is the same on all workers."""
    rng = np.random.default_rng(0)
    with strategy.scope():
        weights = [
            keras.Variable(
                rng.standard_normal((width, width), "float32") / width**0.5
            )
            for _ in range(depth)
        ]
        optimizer = make_optimizer()
        optimizer.build(weights)
    x, y = tf.constant(rng.standard_normal((2, BATCH, width), "float32"))

    def replica() -> None:
        with tf.GradientTape() as tape:
            hidden = x
            for weight in weights:
                hidden = tf.tanh(hidden @ weight)
            loss = tf.reduce_mean((hidden - y) ** 2)
            loss /= strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, [w.value for w in weights])
        optimizer.apply(gradients, weights)

    return tf.function(lambda: strategy.run(replica), autograph=False)


def mean(strategy: tf.distribute.Strategy, value: float) -> float:
    """Return the mean of a value over all workers."""

    def replica() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("mean", tf.constant(value, tf.float64))

    return float(strategy.run(replica))


def work(contender: str, model: str, steps: int, path: pathlib.Path) -> None:
    """Train as one worker; the first worker writes times and mean bytes."""
    kind, optimizer = CONTENDERS[contender]
    strategy = kind() if kind else tf.distribute.get_strategy()
    step = make_step(strategy, OPTIMIZERS[optimizer], *MODELS[model])
    for _ in range(WARM_UP):
        step()
    bytes_before = sent_bytes()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    sent = mean(strategy, (sent_bytes() - bytes_before) / steps)
    if not kind or strategy.cluster_resolver.task_id == 0:
        result = {"step_ms": times, "bytes_per_step": sent}
        path.write_text(json.dumps(result))


def run_group(contender: str, model: str, workers: int, steps: int) -> dict:
    """Run the workers of a contender; return the first worker's result."""
    own = ["--work", contender, "--model", model, "--steps", str(steps)]
    count = workers if CONTENDERS[contender][0] else 1
    return launched.run(__file__, count, *own)


def measure(model: str, workers: int, rounds: int, steps: int) -> dict:
    """Return step times and bytes per step and worker of all contenders."""
    results: dict[str, dict[str, list[float]]] = {
        name: {"step_ms": [], "bytes_per_step": []} for name in CONTENDERS
    }
    with tqdm.tqdm(total=rounds * len(CONTENDERS), desc=model) as progress:
        for _ in range(rounds):
            for name, result in results.items():
                found = run_group(name, model, workers, steps)
                result["step_ms"] += found["step_ms"]
                result["bytes_per_step"].append(found["bytes_per_step"])
                progress.update()
    depth, width = MODELS[model]
    return {
        "workers": workers,
        "variables": depth,
        "parameters": depth * width**2,
        "contenders": results,
    }


def main() -> None:
    parser = results.options(__file__, __doc__, workers=2, rounds=3, steps=20)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--work", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.model, arguments.steps, arguments.output)
        return
    for name in [arguments.model] if arguments.model else MODELS:
        result = measure(
            name, arguments.workers, arguments.rounds, arguments.steps
        )
        results.record(arguments.output, name, result, tables.exchange)


if __name__ == "__main__":
    main()
