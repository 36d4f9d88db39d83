"""Which schedule loses least with local steps, at a given number of bytes?

    python benchmarks/local_schedule.py [--models "text, 2 workers"] [--seeds 3]

A candidate sends a given number of times fewer bytes than a run that exchanges
dense float32 gradients in every step. Its sparsity follows from this number.
First, short runs with one seed compare all candidates on the text. Longer runs
then compare the best candidate with the inner optimizer alone ("dense"), with
more and fewer bytes, and with the stages that `for_steps` sets for gradients.
The inner optimizer is AdamW; the best candidate also trains with Muon.
Models named "long" have runs of ten times as many steps. `local_simulation.py`
trains; learning rates are chosen as in study.py.

Here, even the smallest variables are compressed. Bytes are those of one large
variable, as in run_bytes.py.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import results
import tables
from local_simulation import ADAMW, MUON, Simulation
from run_bytes import ROUNDS, SIZE, bytes_of
from study import DENSE, initial_weights, tuned_rate
from tasks import TASKS, Task, make_transformer, manual, sources

from tf_optimizers.compression.sparsity_schedule import (
    OUTER_LEARNING_RATE,
    RECOMMENDED,
    ROUNDS_VALUE_DTYPE,
    STEP_AHEAD,
    VALUE_DTYPE,
    SparsitySchedule,
    recommended_schedule,
)
from tf_optimizers.demo.network import build_model
from tf_optimizers.demo.results import write_json

NARROW = 64  # The width of the transformer.
RATES = [2.0**k for k in range(-9, -4)]
TUNING_SEED = 10_001
BUDGET = 1000
# The numbers of steps are multiples of the length of every round, so that a run
# ends with a round. `SEARCH` holds the steps and the seed of the search.
STEPS, SEARCH = 3240, (1200, 0)
LONG = 10 * STEPS
# "early" and "late" send `MORE` times as much in a quarter of the run.
QUARTER, MORE = 4, 3


class Candidate(NamedTuple):
    """A schedule of local steps; see `tfo.SparseLoCo`."""

    sync_every: int
    outer_learning_rate: float = 1.0
    value_dtype: str = "int4"
    shape: str = "flat"  # "early" or "late": the quarter that sends more.
    residual_decay: float = 1.0
    fewer: int = BUDGET
    step_ahead: float = 0.0
    average_moments: bool = False  # Their bytes are not counted.

    @property
    def name(self) -> str:
        parts = [f"every {self.sync_every} steps", f"{self.fewer:,} times"]
        parts += [f"outer {self.outer_learning_rate:g}", self.value_dtype]
        if self.shape != "flat":
            parts.append(self.shape)
        if self.residual_decay < 1:
            parts.append(f"decay {self.residual_decay:g}")
        if self.step_ahead:
            parts.append(f"ahead {self.step_ahead:g}")
        if self.average_moments:
            parts.append("moments averaged")
        return ", ".join(parts)

    def arguments(self, steps: int) -> dict[str, Any]:
        """Return arguments of `Simulation.train` that send the wanted bytes."""
        names = ("sync_every", "outer_learning_rate", "value_dtype")
        own = {name: getattr(self, name) for name in names}
        if self.residual_decay < 1:
            own["residual_decay"] = self.residual_decay
        if self.step_ahead:
            own["step_ahead"] = self.step_ahead
        if self.average_moments:
            own["average_moments"] = True
        low, high = 0.0, 1.0
        while high - low > 1e-4:
            share = (low + high) / 2
            if (
                times_fewer(own | self._schedule(share, steps), steps)
                < self.fewer
            ):
                high = share
            else:
                low = share
        return own | self._schedule(low, steps)

    def _schedule(self, share: float, steps: int) -> dict[str, Any]:
        """Return stages in which a round sends the fraction `share`."""
        usual = round(max(0.0, 1 - share), 4)
        less = round(max(1e-4, 1 - MORE * share), 4)
        if self.shape == "flat":
            return {"sparsity": (max(usual, 1e-4),)}
        stages = {"sparsity": (less, max(usual, less))}
        if self.shape == "early":  # Two stages, each half of `rampup_step`.
            return stages | {"rampup_step": 2 * steps // QUARTER}
        return stages | {
            "rampup_step": 2,
            "rampdown_begin_step": steps - steps // QUARTER,
            "rampdown_step": steps,  # Its first stage lasts to the end.
        }


def times_fewer(arguments: dict[str, Any], steps: int) -> float:
    """Return how many times fewer bytes a run sends than a dense run."""
    every = arguments["sync_every"]
    own = {"sync_every": every} | {
        name: value
        for name, value in arguments.items()
        if name.startswith(("ramp", "spars"))
    }
    dtype = arguments.get("value_dtype", "float32")
    sent = bytes_of(SparsitySchedule(**own), steps, dtype, every)
    return steps * 4 * SIZE / sent


def stages_of_dgc(steps: int, sync_every: int) -> dict[str, Any]:
    """Return stages as `for_steps` sets them without local steps.

    A stage is left out if the rounds of a run would send each entry fewer than
    two times, on average.
    """
    rounds = steps // sync_every
    sparsities = tuple(each for each in RECOMMENDED if rounds * (1 - each) >= 2)
    stages = recommended_schedule(steps, sparsities)
    return stages | {"sync_every": sync_every, "value_dtype": VALUE_DTYPE}


def candidates() -> list[Candidate]:
    """Return the candidates that the search compares."""
    found = []
    for every in ROUNDS:
        found += [
            Candidate(every),
            Candidate(every, 1.4),
            Candidate(every, 1.8),
            Candidate(every, 1.4, "int2"),
            Candidate(every, 1.4, shape="early"),
            Candidate(every, 1.4, shape="late"),
            Candidate(every, 1.4, residual_decay=0.95),
        ]
    found += [Candidate(every, 1.4, "float16") for every in (15, 60)]
    found += [
        Candidate(every, 1.4, fewer=fewer)
        for every in (8, 30)
        for fewer in (250, 500)
    ]
    return found


# The best settings in the search; `for_steps` sets them.
BEST = partial(
    Candidate,
    outer_learning_rate=OUTER_LEARNING_RATE,
    value_dtype=ROUNDS_VALUE_DTYPE,
    step_ahead=STEP_AHEAD,
)
# Candidates that differ in `step_ahead`, for two workers and two seeds.
AHEAD = (
    *(Candidate(every, step_ahead=0.5) for every in ROUNDS),
    Candidate(8, OUTER_LEARNING_RATE, step_ahead=0.5),
    *(BEST(8, step_ahead=ahead) for ahead in (0.125, 0.5, 1.0)),
)
# Candidates that send more or fewer bytes, for one seed.
COMPARED = (
    Candidate(30, OUTER_LEARNING_RATE, fewer=500),
    Candidate(30, OUTER_LEARNING_RATE, fewer=2000),
    Candidate(8, OUTER_LEARNING_RATE, fewer=250),
)
# Compared in long runs.
FEWEST = BEST(8, fewer=5000)
# Also compared on the text, with two workers and three seeds.
LONG_COMPARED = (
    BEST(30, fewer=5000),
    BEST(30, step_ahead=0.0),
    BEST(30, fewer=5000, step_ahead=0.0),
)


class Model(NamedTuple):
    """A task, a number of workers and of steps, and the inner optimizer.

    The workers share each batch.
    """

    task: Task
    workers: int = 2
    steps: int = STEPS
    inner: str = ADAMW


def narrow(task: Task, read: Callable[[], str]) -> Task:
    """Return a task with a network that trains faster."""
    make_model = partial(make_transformer, read, NARROW)
    return dataclasses.replace(task, make_model=make_model)


def make_narrow() -> keras.Model:
    """Return a network with two hidden layers, with random weights."""
    return build_model(np.random.randint(1 << 16), (NARROW, NARROW))


DIGITS = dataclasses.replace(TASKS["digits"], make_model=make_narrow)
TEXT, CODE = narrow(TASKS["text"], manual), narrow(TASKS["code"], sources)
SEARCHED, SEARCHED_LONG = "text, 2 workers", "text, 2 workers, long"
MODELS = {
    f"{name}, {workers} workers{suffix}": Model(task, workers, steps, inner)
    for steps, inner, suffix in (
        (STEPS, ADAMW, ""),
        (LONG, ADAMW, ", long"),
        (STEPS, MUON, ", Muon"),
    )
    for name, task in (("text", TEXT), ("code", CODE))
    for workers in (2, 4)
}
MODELS |= {
    f"code, {workers} workers, long, Muon": Model(CODE, workers, LONG, MUON)
    for workers in (2, 4)
}
# These train only with the best candidate, and dense.
OTHERS = {
    **{f"digits, {n} workers": Model(DIGITS, n) for n in (2, 4, 8)},
    "text, 8 workers": Model(TEXT, 8),
    "code, 8 workers": Model(CODE, 8),
}
MODELS |= OTHERS


class Bench:
    """Trains with schedules that have no results yet, and writes results."""

    def __init__(self, path: pathlib.Path, name: str) -> None:
        self._path, self.document = path, results.load(path)
        task, workers, steps, inner = MODELS[name]
        epochs = -(-steps // task.steps_per_epoch)
        task = dataclasses.replace(task, epochs=epochs)
        self._task = task
        self._simulations = {
            count: Simulation(task.make_model(), count, inner)
            for count in (1, workers)
        }
        self._workers = workers
        self.result = self.document["models"].setdefault(
            name, {"trials": [], "runs": {}}
        )
        if workers > 2:  # Dense runs do not depend on the number of workers.
            other = name.replace(str(workers), "2")
            dense = self.document["models"][other]
            self.result["trials"] = dense["trials"]
            runs = self.result["runs"].setdefault(str(steps), {})
            runs[DENSE] = dense["runs"][str(steps)][DENSE]
        self.result |= {
            "parameters": self._simulations[1].model.count_params(),
            "batch_size": task.batch_size,
            "workers": workers,
        }

    def tune(self, steps: int) -> None:
        """Find the learning rate with the lowest dense validation loss."""
        trials = self.result["trials"]
        done = [trial["learning_rate"] for trial in trials]
        for rate in RATES:
            if rate not in done:
                trials.append(self._train(None, steps, TUNING_SEED, rate))
                write_json(self.document, self._path)
        self.result["learning_rate"] = tuned_rate(trials)

    def train(
        self, name: str, arguments: dict | None, steps: int, seed: int
    ) -> float:
        """Train a run, if it is missing; return its validation loss.

        Args:
            name: The name of the schedule in the file.
            arguments: Arguments of `Simulation.train`; None for the inner
                optimizer alone.
            steps: The number of steps of the run.
            seed: The seed of weights and batches.
        """
        schedules = self.result["runs"].setdefault(str(steps), {})
        found = schedules.setdefault(name, {"arguments": arguments, "runs": []})
        found["fewer"] = times_fewer(arguments, steps) if arguments else 1.0
        for run in found["runs"]:
            if run["seed"] == seed:
                return run["validation"]["bits"]
        rate = self.result["learning_rate"]
        run = self._train(arguments, steps, seed, rate)
        found["runs"].append(run)
        write_json(self.document, self._path)
        bits = run["validation"]["bits"]
        print(f"{steps} steps, seed {seed}, {name}: {bits:.4f}", flush=True)
        return bits

    def _train(
        self, arguments: dict | None, steps: int, seed: int, rate: float
    ) -> dict:
        workers = self._workers if arguments else 1
        simulation = self._simulations[workers]
        simulation.train(
            initial_weights(self._task, [seed])[seed],
            list(islice(self._task.batches(seed), steps)),
            rate,
            # One worker exchanges nothing, so rounds may have any length.
            **arguments or {"sync_every": max(ROUNDS)},
        )
        data = self._task.data
        return {
            "seed": seed,
            "learning_rate": rate,
            "validation": simulation.evaluate(*data["validation"]),
            "test": simulation.evaluate(*data["test"]),
        }


def search(bench: Bench) -> None:
    """Train dense and with all candidates, with one seed, in short runs."""
    bench.train(DENSE, None, *SEARCH)
    for each in candidates():
        bench.train(each.name, each.arguments(SEARCH[0]), *SEARCH)


def compare(bench: Bench, name: str, seeds: int) -> None:
    """Train the best candidates, and schedules to compare them with."""
    tried: dict[str, tuple[dict | None, int]] = {DENSE: (None, seeds)}
    rounds = ROUNDS if name == SEARCHED else (8, 30)
    found = [
        Candidate(every, OUTER_LEARNING_RATE, dtype)
        for dtype in ("int4", "int2")
        for every in rounds
    ]
    tried |= {each.name: (each.arguments(STEPS), 3) for each in found}
    for every in rounds:
        tried[BEST(every).name] = BEST(every).arguments(STEPS), seeds
    for every in rounds:
        own = stages_of_dgc(STEPS, every)
        tried[f"every {every} steps, stages of DGC"] = own, 1
    if name == SEARCHED:
        tried |= {each.name: (each.arguments(STEPS), 2) for each in AHEAD}
        tried |= {each.name: (each.arguments(STEPS), 1) for each in COMPARED}
        for rate in (1.0, OUTER_LEARNING_RATE):
            own = {"sync_every": 30, "sparsity": (0.0,)}
            own["outer_learning_rate"] = rate
            tried[f"every 30 steps, everything, outer {rate:g}"] = own, 1
    if MODELS[name].workers > 2:  # What is lost without compression?
        own = {"sync_every": 8, "sparsity": (0.0,)}
        tried["every 8 steps, everything, outer 1"] = own, seeds
        each = BEST(8, average_moments=True)
        tried[each.name] = each.arguments(STEPS), seeds
    for seed in range(seeds):
        for key, (arguments, count) in tried.items():
            if seed < count:
                bench.train(key, arguments, STEPS, seed)


def compare_long(bench: Bench, name: str, seeds: int) -> None:
    """Train the best schedule, and those to compare it with, in long runs."""
    for seed in range(seeds):
        bench.train(DENSE, None, LONG, seed)
        tried = [FEWEST]
        if MODELS[name].inner == ADAMW:
            tried.append(BEST(8))
        if name == SEARCHED_LONG and seed < 3:
            tried += LONG_COMPARED
        for each in tried:
            bench.train(each.name, each.arguments(LONG), LONG, seed)


def compare_best(bench: Bench, seeds: int) -> None:
    """Train dense, and with the best candidate."""
    for seed in range(seeds):
        bench.train(DENSE, None, STEPS, seed)
        bench.train(BEST(8).name, BEST(8).arguments(STEPS), STEPS, seed)


def main() -> None:
    parser = results.options(__file__, __doc__, MODELS, seeds=5)
    arguments = parser.parse_args()
    for name in arguments.models:
        bench = Bench(arguments.output, name)
        if MODELS[name].steps == LONG:
            bench.tune(LONG)
            compare_long(bench, name, arguments.seeds)
        elif MODELS[name].inner == MUON or name in OTHERS:
            bench.tune(STEPS)
            compare_best(bench, arguments.seeds)
        else:
            bench.tune(SEARCH[0])
            if name == SEARCHED:
                search(bench)
            compare(bench, name, arguments.seeds)
        print(tables.local_schedule(name, bench.result), end="\n\n")


if __name__ == "__main__":
    main()
