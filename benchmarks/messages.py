"""What does a message cost, if all messages leave at the same time?

    python benchmarks/messages.py [--workers 2 4 8 16] [--round-trips 0 20]

Workers gather the entries of a step, 4,000 of 4 M parameters, and do nothing
else. As in latency.py, workers may be far from each other. Each worker sends a
message to every other worker, all at the same time. Since workers share the
cores of this machine, the processor time of a gather is read from the clock of
the process, which counts only its own work. The time of a message is fitted to
the gathers in one level, over all numbers of workers and round trips:

    processor ms of a gather = fixed + message x (workers - 1)

The milliseconds of a gather are the first worker's. Its processor time is the
mean over workers. Groups of four workers or more also gather in two levels, as
our strategy does with 64 replicas and more.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hosts
import numpy as np
import results
import tables
import tensorflow as tf
import tqdm
from far_hosts import Loopback, far_groups

import tf_optimizers as tfo
from tf_optimizers.codes.entries import Entries
from tf_optimizers.replicas import replicas_of
from tf_optimizers.workers.collectives import launcher

SIZE, COUNT = 4_000_000, 4_000
WARM_UP = 3
GATHERS = 20
ONE, TWO = "one level", "two levels"
LEVELS = {ONE: 1 << 20, TWO: 4}  # The fewest workers that use two levels.


class Gathering:
    """The gathers of one worker."""

    def __init__(self, levels: str) -> None:
        launcher.FEWEST_IN_LEVELS = LEVELS[levels]
        self.strategy = tfo.SparseMultiWorkerMirroredStrategy()
        rng = np.random.default_rng(0)
        positions = np.sort(rng.choice(SIZE, COUNT, replace=False))
        entries = Entries(tf.ones([COUNT]), tf.constant(positions), SIZE)

        def replica() -> tf.Tensor:
            (every,) = replicas_of(self.strategy).gather_and_sum([entries])
            return tf.size(every.values)

        self.gather = tf.function(
            lambda: self.strategy.run(replica), autograph=False
        )

    def measure(self, gathers: int) -> dict:
        """Return the milliseconds of gathers, and the mean processor time."""
        start, times = time.process_time(), [time.perf_counter()]
        for _ in range(gathers):
            self.gather()
            times.append(time.perf_counter())
        # Processor time of a single gather would miss work before and after it.
        processor = time.process_time() - start
        return {
            "ms": (1e3 * np.diff(times)).tolist(),
            "processor_ms": 1e3 * processor / gathers,
        }


def measure(
    workers: int, levels: str, round_trips: list[float], gathers: int
) -> dict:
    """Return the times of a gather, by round trip."""
    found = {}
    command = [__file__, "--work", levels]
    with far_groups(Loopback(workers), [command]) as (group,):
        title = f"{workers} workers, {levels}"
        for milliseconds in tqdm.tqdm(round_trips, title):
            group.set_round_trip(milliseconds)
            group.ask(function="measure", gathers=WARM_UP)
            answers = group.ask(function="measure", gathers=gathers)
            each = [answer["processor_ms"] for answer in answers]
            found[f"{milliseconds:g}"] = {
                "ms": answers[0]["ms"],
                "processor_ms": statistics.mean(each),
            }
    return found


def message_ms(result: dict) -> float:
    """Return the processor milliseconds of a message, by least squares."""
    points = [
        (int(workers) - 1, found["processor_ms"])
        for workers, by_round_trip in result[ONE].items()
        for found in by_round_trip.values()
    ]
    return float(np.polyfit(*np.transpose(points), 1)[0])


def main() -> None:
    parser = results.options(__file__, __doc__, gathers=GATHERS)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument(
        "--round-trips", type=float, nargs="+", default=[0, 20], help="ms"
    )
    parser.add_argument("--work", choices=LEVELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        hosts.answer({"measure": Gathering(arguments.work).measure})
        return
    hosts.end_on_signals()
    result: dict = {levels: {} for levels in LEVELS}
    for workers in arguments.workers:
        for levels in LEVELS if workers >= LEVELS[TWO] else [ONE]:
            result[levels][str(workers)] = measure(
                workers, levels, arguments.round_trips, arguments.gathers
            )
        result["message_ms"] = message_ms(result)
        results.record(arguments.output, "4 M", result, tables.messages)


if __name__ == "__main__":
    main()
