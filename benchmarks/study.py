"""Trains variants of an optimizer, and compares them with the dense variant.

Each worker is a logical device of one process; separate processes would compute
the same. All variants train at the learning rate for which the dense variant
has the lowest mean validation loss on `Family.tuning_seeds`. The runs at this
rate have other seeds. A seed gives all variants the same initial weights and
batches. The test split is only used at the end of a run. Every run is written
when it ends, so an interrupted study keeps its finished runs.
"""

import argparse
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import results
import tables
import tensorflow as tf
import tqdm
from tasks import TASKS, Task, TaskTrainer

from tf_optimizers.demo.results import write_json

DENSE = "dense"
SEEDS = 8
POINTS = 10  # Points of a learning curve.

WEIGHTS = list[list]


class Variant(NamedTuple):
    """A number of workers, and an optimizer's factory.

    The factory takes a schedule of the learning rate, and the number of steps.
    """

    workers: int
    make_optimizer: Callable
    seeds: int = SEEDS  # The largest number of seeds to train with.


class Family(NamedTuple):
    """Variants of an optimizer, one of them dense, on a task."""

    task: str
    rates: Sequence[float]
    tuning_seeds: Sequence[int]
    variants: dict[str, Variant]


def make_strategy(workers: int) -> tf.distribute.Strategy:
    """Return a strategy of logical devices; for one worker, the default."""
    if workers == 1:
        return tf.distribute.get_strategy()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * workers,
    )
    return tf.distribute.MirroredStrategy(
        [f"CPU:{worker}" for worker in range(workers)],
        # Collectives within a process would take most of the time of a step.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def initial_weights(task: Task, seeds: list[int]) -> dict[int, WEIGHTS]:
    """Return the initial weights of each seed."""
    weights = {}
    for seed in seeds:
        keras.utils.set_random_seed(seed)
        weights[seed] = task.make_model().get_weights()
    return weights


def train(
    trainer: TaskTrainer, weights: WEIGHTS, seed: int, rate: float, title: str
) -> dict:
    """Train for a whole run; return its learning curve and final scores."""
    task, curve = trainer.task, []
    trainer.reset(weights, rate, task.steps)
    every = task.steps // POINTS
    batches = tqdm.tqdm(task.batches(seed), title, task.steps, leave=False)
    for step, batch in enumerate(batches, 1):
        trainer.train_step(*batch)
        if step % every == 0:
            curve.append({"step": step, **trainer.evaluate("validation")})
    return {
        "seed": seed,
        "learning_rate": rate,
        "validation": trainer.evaluate("validation"),
        "test": trainer.evaluate("test"),
        "curve": curve,
    }


def tuned_rate(trials: list[dict]) -> float:
    """Return the rate with the lowest mean validation loss."""
    losses: dict[float, float] = {}
    for trial in trials:
        rate = trial["learning_rate"]
        losses[rate] = losses.get(rate, 0.0) + trial["validation"]["bits"]
    return min(losses, key=losses.__getitem__)


class Study:
    """The results of a family so far, and the file that holds them."""

    def __init__(self, path: pathlib.Path, name: str, family: Family) -> None:
        self.path, self.family = path, family
        self.document = results.load(path)
        self.result = self.document["models"].setdefault(
            name, {"trials": [], "runs": {}}
        )

    def missing_trials(self) -> list[tuple[float, int]]:
        """Return the learning rates and seeds that are not yet tried."""
        done = {(t["learning_rate"], t["seed"]) for t in self.result["trials"]}
        seeds = self.family.tuning_seeds
        wanted = [(rate, seed) for rate in self.family.rates for seed in seeds]
        return [trial for trial in wanted if trial not in done]

    def missing_seeds(self, variant: str, seeds: int) -> list[int]:
        """Return the seeds that a variant has not been trained with."""
        seeds = min(seeds, self.family.variants[variant].seeds)
        done = {run["seed"] for run in self.result["runs"].get(variant, [])}
        return [seed for seed in range(seeds) if seed not in done]

    def add(self, runs: list[dict], run: dict) -> None:
        """Add a run, and write the file."""
        runs.append(run)
        write_json(self.document, self.path)


def work(study: Study, variant: str, seeds: int) -> None:
    """Train one variant with all missing seeds; with dense, tune the rate."""
    task = TASKS[study.family.task]
    workers, make_optimizer, _ = study.family.variants[variant]
    strategy = make_strategy(workers)
    trials = study.missing_trials() if variant == DENSE else []
    missing = study.missing_seeds(variant, seeds)
    weights = initial_weights(task, missing + [seed for _, seed in trials])
    trainer = TaskTrainer(task, strategy, make_optimizer)
    for rate, seed in trials:
        run = train(trainer, weights[seed], seed, rate, f"rate {rate:g}")
        study.add(study.result["trials"], run)
    rate = tuned_rate(study.result["trials"])
    study.result |= {
        "parameters": trainer.model.count_params(),
        "steps": task.steps,
        "batch_size": task.batch_size,
        "learning_rate": rate,
    }
    runs = study.result["runs"].setdefault(variant, [])
    for seed in missing:
        title = f"{variant}, seed {seed}"
        study.add(runs, train(trainer, weights[seed], seed, rate, title))


def main(script: str, description: str, families: dict[str, Family]) -> None:
    """Train all requested variants, each in a separate process."""
    parser = results.options(script, description, families, seeds=SEEDS)
    variants = {v: None for f in families.values() for v in f.variants}
    parser.add_argument(
        "--variants", nargs="+", choices=variants, default=list(variants)
    )
    parser.add_argument("--work", choices=variants, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    path, seeds = arguments.output, arguments.seeds
    for name in arguments.models:
        family = families[name]
        if arguments.work:
            work(Study(path, name, family), arguments.work, seeds)
            return
        for variant in arguments.variants:
            if variant not in family.variants:
                continue
            # Separate processes, since TensorFlow configures devices only once.
            if Study(path, name, family).missing_seeds(variant, seeds):
                command = [sys.executable, script, "--work", variant]
                own = ["--models", name, "--seeds", str(seeds)]
                output = ["--output", str(path)]
                subprocess.run([*command, *own, *output], check=True)
        result = Study(path, name, family).result
        print(tables.accuracy(name, result), end="\n\n")
