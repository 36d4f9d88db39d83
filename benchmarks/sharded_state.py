"""What does distributing the state save, and what does it cost?

    python benchmarks/sharded_state.py [--models bert-base] [--steps 5]

`ShardedState` and its inner optimizer step the same variables with the same
gradients, in separate processes, one contender after another: on 1, 2 and 4
workers joined by loopback, and on 2 and 4 logical devices of one process, under
`MirroredStrategy`. Times are the first worker's. The state is that of the
fullest replica; `ShardedState` reports it in `memory_summary()`. Resident
memory is the growth of the first worker, with all its devices. It is measured
twice. The first measurement follows `build`, which adds the state. The second
follows two steps, which add all other memory that steps need, since TensorFlow
keeps this memory. Bytes are the kernel's count of the bytes that the first
worker's TCP sockets send in a step.

If PyTorch is installed (`pip install torch`), its `ZeroRedundancyOptimizer` is
measured, too; see zero_redundancy.py.

`--models` and `--layouts` measure only some models and layouts, and keep the
file's other results. Four workers of BERT-base take 15 GB of memory.
"""

import argparse
import ctypes
import functools
import importlib.util
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import launched
import results
import step_time
import tables
import tensorflow as tf
import tqdm
from exchange import mean

import tf_optimizers as tfo
from tf_optimizers.demo.sockets import sent_bytes

WARM_UP = 2
PACK_BYTES = 1 << 25
MODELS = {name: step_time.MODELS[name] for name in ("20M", "bert-base")}
PEER = pathlib.Path(__file__).parent / "zero_redundancy.py"
OPTIMIZERS = {
    "AdamW": lambda: keras.optimizers.AdamW(1e-3),
    "Lamb": lambda: tfo.Lamb(1e-3),
}


class Layout(NamedTuple):
    """The number of workers, and the number of devices per worker."""

    workers: int
    devices: int  # Per worker.


LAYOUTS = {
    "1 worker": Layout(1, 1),
    "2 workers": Layout(2, 1),
    "4 workers": Layout(4, 1),
    "2 devices": Layout(1, 2),
    "4 devices": Layout(1, 4),
}


def resident_bytes() -> int:
    """Return the resident memory of this process, without freed memory."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def strategy_of(layout: Layout) -> tf.distribute.Strategy:
    """Return the strategy of this process."""
    if layout.workers > 1:
        # Without a limit, sums of all gradients take several times their
        # memory.
        options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=PACK_BYTES
        )
        return tfo.SparseMultiWorkerMirroredStrategy(
            communication_options=options
        )
    if layout.devices == 1:
        return tf.distribute.get_strategy()
    devices = [f"CPU:{i}" for i in range(layout.devices)]
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration() for _ in devices],
    )
    return tf.distribute.MirroredStrategy(devices)


def make_step(
    strategy: tf.distribute.Strategy,
    optimizer: keras.optimizers.Optimizer,
    weights: list[keras.Variable],
    gradients: Any,
) -> Callable:
    """Return a step with given gradients."""

    def replica(gradients: list[tf.Tensor]) -> None:
        optimizer.apply(gradients, weights)

    step = tf.function(
        lambda gradients: strategy.run(replica, args=(gradients,)),
        autograph=False,
    )
    return functools.partial(step, gradients)


def measured(
    step: Callable[[], object], steps: int, before: int
) -> dict[str, Any]:
    """Return the times of steps, and the growth of resident memory.

    Args:
        step: The step to time.
        steps: Number of timed steps, after a warm-up.
        before: The resident memory before the optimizer was built.
    """
    for _ in range(WARM_UP):
        step()
    grown = resident_bytes() - before
    bytes_before, times = sent_bytes(), []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return {
        "step_ms": times,
        "bytes_per_step": (sent_bytes() - bytes_before) / steps,
        "resident_bytes": grown,
    }


def work(
    layout: Layout,
    optimizer: str,
    model: str,
    is_sharded: bool,
    steps: int,
    path: pathlib.Path,
) -> None:
    """Step as one worker; the first worker writes the result."""
    strategy = strategy_of(layout)
    with strategy.scope():
        weights = [
            keras.Variable(tf.fill(shape, 0.1), name=f"weight_{i}")
            for i, shape in enumerate(MODELS[model])
        ]
    gradients = strategy.run(lambda: [tf.fill(w.shape, 1e-3) for w in weights])
    with strategy.scope():
        # The first optimizer of a process also takes memory for other purposes,
        # so build a small optimizer before the measurement.
        OPTIMIZERS[optimizer]().build([keras.Variable(tf.zeros([8, 8]))])
    before = resident_bytes()
    with strategy.scope():
        inner = OPTIMIZERS[optimizer]()
        used = tfo.ShardedState(inner) if is_sharded else inner
        used.build(weights)
    if layout.workers > 1:
        # Wait: the first worker may still be sending initial values, which
        # would count as memory.
        mean(strategy, 0.0)
    built = resident_bytes() - before
    step = make_step(strategy, used, weights, gradients)
    result = measured(step, steps, before)
    held = sum(variable.value.shape.num_elements() for variable in weights) * 8
    if is_sharded:
        summary = used.memory_summary()
        held = max(summary["owned"]) or held
    result |= {"state_bytes": held, "built_bytes": built}
    if layout.workers == 1 or strategy.cluster_resolver.task_id == 0:
        path.write_text(json.dumps(result))


def peers(layout: Layout) -> list[str]:
    """Return PyTorch's contenders; none on one worker or without PyTorch."""
    if layout.workers == 1:
        return []
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed, so it is not measured.")
        return []
    return ["PyTorch's AdamW"]


def measure(model: str, rounds: int, steps: int, some: list[str]) -> dict:
    """Return the times and memory of each contender on each layout."""
    found: dict = {layout: {} for layout in some}
    contenders = [
        (layout, optimizer, is_sharded)
        for layout in some
        for optimizer in [*OPTIMIZERS, *peers(LAYOUTS[layout])]
        for is_sharded in (False, True)
    ]
    for _ in range(rounds):
        for layout, optimizer, is_sharded in tqdm.tqdm(contenders, desc=model):
            own = ["--models", model, "--steps", str(steps)]
            own += ["--sharded"] if is_sharded else []
            script = str(PEER)
            if optimizer in OPTIMIZERS:
                own += ["--work", layout, "--optimizer", optimizer]
                script = __file__
            result = launched.run(script, LAYOUTS[layout].workers, *own)
            kind = "sharded" if is_sharded else "whole"
            mine = found[layout].setdefault(
                f"{optimizer}, {kind}", dict.fromkeys(result)
            )
            for name, value in result.items():
                many = value if isinstance(value, list) else [value]
                mine[name] = [*(mine[name] or []), *many]
    parameters = sum(tf.TensorShape(s).num_elements() for s in MODELS[model])
    return {
        "parameters": parameters,
        "variables": len(MODELS[model]),
        "layouts": found,
    }


def main() -> None:
    parser = results.options(__file__, __doc__, MODELS, rounds=1, steps=5)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--work", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--optimizer", help=argparse.SUPPRESS)
    parser.add_argument(
        "--sharded", action="store_true", help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.work:
        work(
            LAYOUTS[arguments.work],
            arguments.optimizer,
            arguments.models[0],
            arguments.sharded,
            arguments.steps,
            arguments.output,
        )
        return
    for name in arguments.models:
        result = measure(
            name, arguments.rounds, arguments.steps, arguments.layouts
        )
        known = results.load(arguments.output)["models"].get(name, {})
        every = known.get("layouts", {}) | result["layouts"]
        result["layouts"] = {key: every[key] for key in LAYOUTS if key in every}
        results.record(arguments.output, name, result, tables.sharded_state)


if __name__ == "__main__":
    main()
