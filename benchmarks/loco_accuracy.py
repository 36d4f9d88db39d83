"""Does AdamW in SparseLoCo learn what dense AdamW learns?

    python benchmarks/loco_accuracy.py [--seeds 3]

As accuracy.py does it, on its text task: workers are logical devices, and the
rate is that of the lowest validation loss of dense AdamW on another seed. The
same rate, seeds, weights and batches for all. Every run is written when it has
ended; what an interrupted study has is not trained again.
"""

import argparse
import functools
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import results
import tables
from accuracy import (
    SPARSITY,
    STAGES,
    Variant,
    initial_weights,
    make_strategy,
    train,
    tuned_rate,
)
from tasks import TASKS, TaskTrainer

import tf_optimizers as tfo
from tf_optimizers.demo.results import write_json

TASK = "text"
RATES = [2.0**k for k in (-9, -8, -7, -6)]
TUNING_SEED = 10_001
WEIGHT_DECAY = 0.01


def adamw(rate: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(rate, weight_decay=WEIGHT_DECAY)


def loco(sparsity: tuple[float, ...], rate: Any, steps: int) -> tfo.SparseLoCo:
    return tfo.SparseLoCo(
        adamw(rate),
        rampup_step=len(sparsity) * steps // STAGES,
        sparsity=sparsity,
    )


def within(workers: int, sparsity: tuple[float, ...]) -> Variant:
    make: Callable = functools.partial(loco, sparsity)
    return Variant(workers, make)


DENSE = "dense"
VARIANTS = {
    DENSE: Variant(1, lambda rate, _: adamw(rate)),
    "SparseLoCo at 99.6 %, 2 workers": within(2, SPARSITY[:-1]),
    "SparseLoCo at 99.9 %, 2 workers": within(2, SPARSITY),
}


def work(variant: str, seeds: int, path: pathlib.Path) -> None:
    """Tune, if nobody has, and train a variant with what seeds are missing."""
    document, task = results.load(path), TASKS[TASK]
    result = document["models"].setdefault(TASK, {"trials": [], "runs": {}})
    runs = result["runs"].setdefault(variant, [])
    tried = [trial["learning_rate"] for trial in result["trials"]]
    trials = [rate for rate in RATES if rate not in tried]
    done = [run["seed"] for run in runs]
    missing = [seed for seed in range(seeds) if seed not in done]
    workers, make_optimizer = VARIANTS[variant]
    strategy = make_strategy(workers)
    weights = initial_weights(task, [*missing, TUNING_SEED])
    trainer = TaskTrainer(task, strategy, make_optimizer)

    def run(into: list[dict], seed: int, rate: float) -> None:
        title = f"{variant}, seed {seed}"
        into.append(train(trainer, weights[seed], seed, rate, title))
        write_json(document, path)

    for rate in trials:
        run(result["trials"], TUNING_SEED, rate)
    result |= {
        "parameters": trainer.model.count_params(),
        "steps": task.steps,
        "batch_size": task.batch_size,
        "learning_rate": tuned_rate(result["trials"]),
    }
    for seed in missing:
        run(runs, seed, result["learning_rate"])


def main() -> None:
    parser = results.options(__file__, __doc__, seeds=3)
    parser.add_argument("--work", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    path, seeds = arguments.output, arguments.seeds
    if arguments.work:
        work(arguments.work, seeds, path)
        return
    for variant in VARIANTS:
        # A process each: TensorFlow configures its devices only once.
        own = ["--work", variant, "--seeds", str(seeds), "--output", str(path)]
        subprocess.run([sys.executable, __file__, *own], check=True)
    print(tables.accuracy(TASK, results.load(path)["models"][TASK]))


if __name__ == "__main__":
    main()
