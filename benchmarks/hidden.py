"""How much of a round trip does `DGCMomentum(..., delay=1)` hide?

    python benchmarks/hidden.py [--rounds 3] [--round-trip 20]
        [--workers 2] [--batches 64 512 2048]

The same `fit` with and without `delay`, between workers with and without a
round trip, see far_hosts.py. A step cannot hide more of it than it takes by
itself, which grows with the batch. Contenders take turns, in the same
processes. Times are the first worker's, from the end of one step to the end of
the next.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hosts
import numpy as np
import results
import tables
import tensorflow as tf
import tqdm
from far_hosts import FarGroup, Loopback, far_groups
from fit import CLASSES, Clock, make_model
from latency import round_trips_of

import tf_optimizers as tfo

WIDTH = 512
STEPS = 12
CONTENDERS = {
    "DGC": lambda: tfo.DGCMomentum(1e-3),
    "DGC, delay=1": lambda: tfo.DGCMomentum(1e-3, delay=1),
    # In a conditional.
    "DGC, delay=1, stages": lambda: tfo.DGCMomentum(
        1e-3, rampup_step=2, sparsity=(0.9, 0.999), delay=1
    ),
}


class Training:
    """One worker's part: steps of every contender."""

    def __init__(self) -> None:
        self.strategy = tfo.SparseMultiWorkerMirroredStrategy()
        with self.strategy.scope():
            self.models = {
                name: make_model(WIDTH, make_optimizer())
                for name, make_optimizer in CONTENDERS.items()
            }

    def measure(self, contender: str, batch: int) -> list[float]:
        """Return the milliseconds of each step."""
        rng = np.random.default_rng(0)
        # The first step and the last are not timed.
        x = rng.standard_normal((batch, WIDTH), "float32")
        y = rng.integers(0, CLASSES, batch)
        data = tf.data.Dataset.from_tensors((x, y)).cache().repeat(STEPS + 2)
        clock = Clock()
        self.models[contender].fit(
            data, shuffle=False, verbose=0, callbacks=[clock]
        )
        return clock.times[1:-1]


def take_turns(
    group: FarGroup, round_trip: float, batch: int, rounds: int
) -> dict[str, list[float]]:
    """Return every contender's milliseconds."""
    group.set_round_trip(round_trip)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    turns = [name for _ in range(rounds) for name in CONTENDERS]
    for name in tqdm.tqdm(turns, f"{batch} rows, {round_trip:g} ms"):
        found = group.ask(function="measure", contender=name, batch=batch)
        times[name] += found[0]
    return times


def main() -> None:
    parser = results.options(__file__, __doc__, rounds=3, workers=2)
    parser.add_argument("--round-trip", type=float, default=20.0)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[64, 512, 2048]
    )
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        hosts.answer({"measure": Training().measure})
        return
    hosts.end_on_signals()
    net = Loopback(arguments.workers)
    with far_groups(net, [[__file__, "--work"]]) as (group,):
        for batch in arguments.batches:
            take_turns(group, 0, batch, 1)  # Traces.
            found = {
                f"{ms:g}": take_turns(group, ms, batch, arguments.rounds)
                for ms in (0, arguments.round_trip)
            }
            step_ms = {
                name: {key: times[name] for key, times in found.items()}
                for name in CONTENDERS
            }
            contenders = {
                name: {"step_ms": times, "round_trips": round_trips_of(times)}
                for name, times in step_ms.items()
            }
            name = f"{arguments.workers} workers, {batch} rows"
            result = {"workers": arguments.workers, "contenders": contenders}
            results.record(arguments.output, name, result, tables.latency)


if __name__ == "__main__":
    main()
