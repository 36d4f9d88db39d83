"""What does a training step cost when workers are far from each other?

    python benchmarks/latency.py [--quick] [--workers 2 4 8]
        [--round-trips 0 5 20 80] [--link "100 Mbit/s"] [--optimizer AdamW]
        [--width 1414] [--by-keras]

`--quick` takes a few minutes: one round at 0 and 20 ms. Under our strategy, it
measures only `fit`, without float16 and int4. Without `--output`, it writes no
file.

Workers are processes of this machine and share its cores. Forwarders delay all
bytes between them by half of a round trip; see far_hosts.py. Without a delay,
bytes take the same path, so the difference is due to the round trip alone:

    round trips per step = (ms with delay - ms without) / ms of the round trip

The processes of all contenders run at the same time. Contenders take turns, in
rounds, at every delay. Times are the first worker's, from the end of one step
to the end of the next. The model has two square layers of `--width`. `--link`
limits the rate, too, which needs root; see hosts.py. With local steps, a time
is the mean over the steps of a round. With one step per epoch, times include
the work after an epoch. `--by-keras` adds the version of Keras to the names of
contenders, and keeps the results of other versions.
"""

import argparse
import contextlib
import functools
import os
import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hosts
import keras
import numpy as np
import results
import tables
import tensorflow as tf
import tqdm
from exchange import OURS, STOCK
from far_hosts import FarGroup, Loopback, far_groups
from fit import CLASSES, Clock, CustomLoop, make_model

import tf_optimizers as tfo

WIDTH, BATCH = 512, 64

ROUNDS = 3
SECONDS_PER_TURN = 2.0
MOST_STEPS = 24
# A step without local steps counts as a round. With fewer rounds, the median
# would be that of the last round, which also waits for the end of the data.
FEWEST_ROUNDS = 3
LOCAL_STEPS = (8, 16)
MOST_IN_ROUNDS = FEWEST_ROUNDS * max(LOCAL_STEPS)

STRATEGIES = {"stock": STOCK, "ours": OURS}
MOMENTUM = {
    "dense": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "DGC": lambda: tfo.DGCMomentum(1e-3),
    "DGC, float16": lambda: tfo.DGCMomentum(1e-3, value_dtype="float16"),
    "DGC, int4": lambda: tfo.DGCMomentum(1e-3, value_dtype="int4"),
}
ADAMW = {
    "AdamW": lambda: keras.optimizers.AdamW(1e-3),
    "AdamW in SparseLoCo": lambda: tfo.SparseLoCo(keras.optimizers.AdamW(1e-3)),
}
IN_ROUNDS = {
    f"AdamW in SparseLoCo, {steps} local steps{name}": (steps, overlap)
    for steps in LOCAL_STEPS
    for name, overlap in {"": False, ", overlap": True}.items()
}


def make_local(steps: int, overlap: bool) -> tfo.SparseLoCo:
    return tfo.SparseLoCo(
        keras.optimizers.AdamW(1e-3), sync_every=steps, overlap=overlap
    )


ADAMW |= {
    name: functools.partial(make_local, *settings)
    for name, settings in IN_ROUNDS.items()
}
OPTIMIZERS = MOMENTUM | ADAMW


# A `fit` in which each step is an epoch.
EPOCHS = "an epoch a step"


class Contender(NamedTuple):
    """An optimizer, its strategy, and the way that steps are called."""

    strategy: str
    optimizer: str
    way: str

    @property
    def round(self) -> int:
        """The number of steps per exchange."""
        return IN_ROUNDS.get(self.optimizer, (1, False))[0]


def family(dense: str, optimizers: Iterable[str]) -> dict[str, Contender]:
    """Return contenders under our strategy, and `dense` under TensorFlow's.

    In Keras 3, `fit` does not run under TensorFlow's own strategy for several
    workers.
    """
    return {
        f"stock, {dense}, custom loop": Contender(
            "stock", dense, "custom loop"
        ),
        f"{dense}, {EPOCHS}": Contender("ours", dense, EPOCHS),
    } | {
        f"{optimizer}, {way}": Contender("ours", optimizer, way)
        for way in ("fit", "custom loop")
        for optimizer in optimizers
    }


FAMILIES = {
    "momentum": family("dense", MOMENTUM),
    "AdamW": family("AdamW", ADAMW),
}
CONTENDERS = {k: v for each in FAMILIES.values() for k, v in each.items()}


class EpochClock(Clock):
    """A `Clock` for a `fit` in which each step is an epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Record the number of the step."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the time since the previous step."""
        super().on_train_batch_end(self._epoch, logs)


class Training:
    """One worker's steps, with every contender of a strategy."""

    def __init__(self, strategy: str, width: int) -> None:
        self.strategy, self.width = STRATEGIES[strategy](), width
        self.models: dict[str, keras.Model] = {}
        self.loops: dict[str, CustomLoop] = {}
        rng = np.random.default_rng(0)
        # The first step is not timed, and the last batch is not used.
        rows = BATCH * (MOST_IN_ROUNDS + 2)
        x = rng.standard_normal((rows, width), "float32")
        y = rng.integers(0, CLASSES, rows)
        data = tf.data.Dataset.from_tensor_slices((x, y))
        self.data = data.batch(BATCH, drop_remainder=True).cache()

    def prepare(self, contender: str) -> None:
        """Build a contender's model and trace a step."""
        with self.strategy.scope():
            optimizer = OPTIMIZERS[CONTENDERS[contender].optimizer]()
            model = make_model(self.width, optimizer)
        self.models[contender] = model
        self.loops[contender] = CustomLoop(model, self.strategy)
        self.measure(contender, 1)

    def measure(self, contender: str, steps: int) -> list[float]:
        """Return the ms of each step; with local steps, each round's mean."""
        clock, data = Clock(), self.data.take(steps + 1)
        fit = functools.partial(
            self.models[contender].fit, data, shuffle=False, verbose=0
        )
        way = CONTENDERS[contender].way
        if way == "fit":
            fit(callbacks=[clock])
        elif way == EPOCHS:
            clock = EpochClock()
            fit(epochs=steps + 1, steps_per_epoch=1, callbacks=[clock])
        else:
            distributed = self.strategy.experimental_distribute_dataset(data)
            self.loops[contender].run(distributed, steps + 1, clock)
        return means(clock.times, CONTENDERS[contender].round)


def means(times: list[float], every: int) -> list[float]:
    """Return the means of groups of `every` times; drop an incomplete group."""
    rounds = len(times) // every * every
    return np.reshape(times[:rounds], [-1, every]).mean(1).tolist()


class Contest:
    """Contenders that take turns, in groups of worker processes.

    Args:
        groups: The group of each strategy.
        contenders: Names of the contenders.
    """

    def __init__(
        self, groups: dict[str, FarGroup], contenders: list[str]
    ) -> None:
        self.groups = groups
        self.asked = {
            name: groups[CONTENDERS[name].strategy] for name in contenders
        }

    def prepare(self) -> None:
        """Trace the steps of all contenders, without a delay."""
        for name, group in tqdm.tqdm(self.asked.items(), "tracing"):
            group.ask(function="prepare", contender=name)

    def take_turns(self, round_trip: float, rounds: int, title: str) -> dict:
        """Return each contender's milliseconds per step, at one delay."""
        for group in self.groups.values():
            group.set_round_trip(round_trip)
        steps = {name: self._fitting_steps(name) for name in self.asked}
        times: dict[str, list[float]] = {name: [] for name in self.asked}
        turns = [name for _ in range(rounds) for name in self.asked]
        for name in tqdm.tqdm(turns, title):
            times[name] += self._measure(name, steps[name])
        return times

    def _fitting_steps(self, name: str) -> int:
        start = time.perf_counter()
        least = CONTENDERS[name].round
        self._measure(name, least)
        fitting = int(SECONDS_PER_TURN / (time.perf_counter() - start))
        most = max(MOST_STEPS // least, FEWEST_ROUNDS)
        return min(max(fitting, FEWEST_ROUNDS), most) * least

    def _measure(self, name: str, steps: int) -> list[float]:
        return self.asked[name].ask(
            function="measure", contender=name, steps=steps
        )[0]


def measure(
    workers: int,
    contenders: list[str],
    round_trips: list[float],
    rounds: int,
    link: str | None,
    width: int,
) -> dict[str, Any]:
    """Return the step times of contenders, by name and round trip."""
    strategies = sorted({CONTENDERS[name].strategy for name in contenders})
    commands = [
        [__file__, "--work", name, "--width", str(width)] for name in strategies
    ]
    with contextlib.ExitStack() as stack:
        net: hosts.Network | Loopback = Loopback(workers)
        if link:
            net = stack.enter_context(hosts.network(workers))
            net.shape(link)
        groups = stack.enter_context(far_groups(net, commands))
        contest = Contest(
            dict(zip(strategies, groups, strict=True)), contenders
        )
        contest.prepare()
        found = {
            milliseconds: contest.take_turns(
                milliseconds, rounds, f"{workers} workers, {milliseconds:g} ms"
            )
            for milliseconds in round_trips
        }
    step_ms = {
        name: {f"{ms:g}": times[name] for ms, times in found.items()}
        for name in contenders
    }
    return {
        "workers": workers,
        "link": link,
        "width": width,
        "contenders": {
            name: {"step_ms": times, "round_trips": round_trips_of(times)}
            for name, times in step_ms.items()
        },
    }


def round_trips_of(step_ms: dict[str, list[float]]) -> dict[str, float]:
    """Return the number of round trips per step, at each delay."""
    medians = {key: statistics.median(times) for key, times in step_ms.items()}
    return {
        key: (median - medians["0"]) / float(key)
        for key, median in medians.items()
        if key != "0"
    }


def parse() -> argparse.Namespace:
    parser = results.options(__file__, __doc__, rounds=ROUNDS, width=WIDTH)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--round-trips",
        type=float,
        nargs="+",
        default=[0, 5, 20, 80],
        help="milliseconds; 0 is always added",
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        help="default: all contenders of `--optimizer`",
    )
    parser.add_argument("--optimizer", choices=FAMILIES, default="momentum")
    parser.add_argument("--link", choices=hosts.LINKS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--by-keras", action="store_true")
    parser.add_argument("--work", choices=STRATEGIES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = FAMILIES[arguments.optimizer]
    if arguments.quick:
        if arguments.output == parser.get_default("output"):
            arguments.output = None
        arguments.round_trips, arguments.rounds = [20], 1
        chosen = {
            name: each
            for name, each in chosen.items()
            if (each.strategy == "stock" or each.way == "fit")
            and not name.startswith(("DGC, float16", "DGC, int4"))
        }
    arguments.contenders = arguments.contenders or list(chosen)
    arguments.round_trips = sorted({0, *arguments.round_trips})
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.work:
        training = Training(arguments.work, arguments.width)
        hosts.answer({"prepare": training.prepare, "measure": training.measure})
        return
    hosts.end_on_signals()
    for workers in arguments.workers:
        wide = arguments.width != WIDTH and f"width {arguments.width:,}"
        parts = f"{workers} workers", arguments.link, wide
        name = ", ".join(filter(None, parts))
        result = measure(
            workers,
            arguments.contenders,
            arguments.round_trips,
            arguments.rounds,
            arguments.link,
            arguments.width,
        )
        if arguments.by_keras:
            others = results.load(arguments.output)["models"].get(name, {})
            result["contenders"] = others.get("contenders", {}) | {
                f"{contender}, Keras {keras.__version__}": found
                for contender, found in result["contenders"].items()
            }
        results.record(arguments.output, name, result, tables.latency)


if __name__ == "__main__":
    main()
