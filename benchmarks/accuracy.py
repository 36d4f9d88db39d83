"""Does DGC at 99.9 % learn what dense momentum SGD learns?

    python benchmarks/accuracy.py [--tasks digits text] [--seeds 8]
        [--variants "DGC, 2 workers"]

Each worker is a logical device of one process, which computes what processes
of their own do. The learning rate is the one of the lowest mean validation loss
of dense momentum SGD on `TUNING_SEEDS`; all train with it, on other seeds. A
seed gives all the same initial weights and the same batches, and only the end
of a run meets the test split. Every run is written when it has ended; what an
interrupted study has is not trained again.
"""

import argparse
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import results
import tables
import tensorflow as tf
import tqdm
from tasks import TASKS, Task, TaskTrainer

import tf_optimizers as tfo
from tf_optimizers.demo.results import write_json

MOMENTUM = 0.9
RATES = {
    "digits": [2.0**k for k in range(-7, 0)],
    "text": [2.0**k for k in range(-5, -1)],
    "code": [2.0**k for k in range(-4, -1)],
}
TUNING_SEEDS = {
    "digits": (10_001, 10_002),
    "text": (10_001,),
    "code": (10_001,),
}

# The paper's sparsities. A stage of the warm-up is 1 / STAGES of the run.
SPARSITY = (0.75, 0.9375, 0.984375, 0.996, 0.999)
STAGES = 40
POINTS = 10  # of a learning curve

WEIGHTS = list[list]


class Variant(NamedTuple):
    """Workers, and what takes a schedule and the steps of a run."""

    workers: int
    make_optimizer: Callable


def dgc(workers: int, **kwargs: bool | str | None) -> Variant:
    """Return DGC with the settings we recommend, but for some."""
    return Variant(
        workers,
        lambda rate, steps: tfo.DGCMomentum.for_steps(
            steps, rate, momentum=MOMENTUM, **kwargs
        ),
    )


def up_to_the_last_stage(workers: int, **kwargs: bool) -> Variant:
    """Return the same with all stages, though the steps be too few."""
    return Variant(
        workers,
        lambda rate, steps: tfo.DGCMomentum(
            rate,
            momentum=MOMENTUM,
            sparsity=SPARSITY,
            rampup_step=steps // 8,
            rampdown_begin_step=steps - steps // 10,
            rampdown_step=steps // 10,
            **kwargs,
        ),
    )


def paddles(
    workers: int, sparsity: tuple[float, ...] = SPARSITY, **kwargs: bool | str
) -> Variant:
    """Return DGC by Paddle's rule, which stays at its last sparsity."""
    return Variant(
        workers,
        lambda rate, steps: tfo.DGCMomentum(
            rate,
            momentum=MOMENTUM,
            rampup_step=len(sparsity) * steps // STAGES,
            sparsity=sparsity,
            rate_in_momentum=False,
            **kwargs,
        ),
    )


NO_WAY_BACK = {"rampdown_begin_step": None, "rampdown_step": 1}
DENSE = "dense"
MAIN = {
    DENSE: Variant(
        1, lambda rate, _: keras.optimizers.SGD(rate, momentum=MOMENTUM)
    ),
    "DGC, 2 workers": dgc(2),
    "DGC, 4 workers": dgc(4),
    "DGC, 8 workers": dgc(8),
    "Paddle's rule, 2 workers": paddles(2),
    "Paddle's rule, 4 workers": paddles(4),
}
ABLATIONS = {
    "DGC, 2 workers, 99.9 %": up_to_the_last_stage(2),
    "DGC, 4 workers, 99.9 %": up_to_the_last_stage(4),
    "DGC, 2 workers, 99.9 %, rate outside": up_to_the_last_stage(
        2, rate_in_momentum=False
    ),
    "DGC, 2 workers, float16 values": dgc(2, value_dtype="float16"),
    "DGC, 2 workers, no way back": dgc(2, **NO_WAY_BACK),
    "DGC, 2 workers, rate outside": dgc(2, rate_in_momentum=False),
    "DGC, 2 workers, no momentum masking": dgc(2, momentum_masking=False),
    "Paddle's rule, 2 workers, float16 values": paddles(
        2, value_dtype="float16"
    ),
    "Paddle's rule, 2 workers, no warm-up": paddles(2, SPARSITY[-1:]),
    "Paddle's rule, 2 workers, no momentum masking": paddles(
        2, momentum_masking=False
    ),
    "Paddle's rule, 2 workers, 99.99 %": paddles(2, (*SPARSITY, 0.9999)),
}
VARIANTS = MAIN | ABLATIONS
ABLATION_SEEDS = 3


def make_strategy(workers: int) -> tf.distribute.Strategy:
    """Return a strategy of logical devices; none is needed for one worker."""
    if workers == 1:
        return tf.distribute.get_strategy()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * workers,
    )
    return tf.distribute.MirroredStrategy(
        [f"CPU:{worker}" for worker in range(workers)],
        # Collectives within a process would be most of the time of a step.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def initial_weights(task: Task, seeds: list[int]) -> dict[int, WEIGHTS]:
    """Return the weights that each seed starts from."""
    weights = {}
    for seed in seeds:
        keras.utils.set_random_seed(seed)
        weights[seed] = task.make_model().get_weights()
    return weights


def train(
    trainer: TaskTrainer, weights: WEIGHTS, seed: int, rate: float, title: str
) -> dict:
    """Train for a whole run; return its curve, and where it ended."""
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
    """Return the rate of the lowest mean validation loss."""
    losses: dict[float, float] = {}
    for trial in trials:
        rate = trial["learning_rate"]
        losses[rate] = losses.get(rate, 0.0) + trial["validation"]["bits"]
    return min(losses, key=losses.__getitem__)


class Study:
    """What is known of a task, in the file where all of it stands."""

    def __init__(self, path: pathlib.Path, task: str) -> None:
        self.path = path
        self.document = results.load(path)
        self.result = self.document["models"].setdefault(
            task, {"trials": [], "runs": {}}
        )

    def missing_trials(self, task: str) -> list[tuple[float, int]]:
        done = {(t["learning_rate"], t["seed"]) for t in self.result["trials"]}
        wanted = [(rate, s) for rate in RATES[task] for s in TUNING_SEEDS[task]]
        return [trial for trial in wanted if trial not in done]

    def missing_seeds(self, variant: str, seeds: int) -> list[int]:
        if variant in ABLATIONS:
            seeds = min(seeds, ABLATION_SEEDS)
        done = {run["seed"] for run in self.result["runs"].get(variant, [])}
        return [seed for seed in range(seeds) if seed not in done]

    def add(self, runs: list[dict], run: dict) -> None:
        runs.append(run)
        write_json(self.document, self.path)


def work(name: str, variant: str, seeds: int, path: pathlib.Path) -> None:
    """Train one variant with all seeds that are missing."""
    study, task = Study(path, name), TASKS[name]
    strategy = make_strategy(VARIANTS[variant].workers)
    trials = study.missing_trials(name) if variant == DENSE else []
    missing = study.missing_seeds(variant, seeds)
    weights = initial_weights(task, missing + [seed for _, seed in trials])
    trainer = TaskTrainer(task, strategy, VARIANTS[variant].make_optimizer)
    for rate, seed in trials:
        run = train(trainer, weights[seed], seed, rate, f"{name}, {rate:g}")
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
        title = f"{name}, {variant}, seed {seed}"
        study.add(runs, train(trainer, weights[seed], seed, rate, title))


def main() -> None:
    parser = results.options(__file__, __doc__, seeds=8)
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS)
    )
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS)
    )
    parser.add_argument("--work", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    path, seeds = arguments.output, arguments.seeds
    if arguments.work:
        work(arguments.tasks[0], arguments.work, seeds, path)
        return
    for task in arguments.tasks:
        for variant in arguments.variants:
            # A process each: TensorFlow configures its devices only once.
            if Study(path, task).missing_seeds(variant, seeds):
                command = [sys.executable, __file__, "--work", variant]
                own = ["--tasks", task, "--seeds", str(seeds)]
                subprocess.run(
                    [*command, *own, "--output", str(path)], check=True
                )
        print(tables.accuracy(task, Study(path, task).result), end="\n\n")


if __name__ == "__main__":
    main()
