"""The gradient compression study: what it saves, and what it costs.

Two worker processes, which run `worker.py`, train with momentum SGD and AdamW,
each dense and compressed. The learning rate is chosen for the dense one, by
mean validation accuracy. Both then train networks with fresh seeds at that
rate, and only those see the test split.
"""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from tqdm import tqdm

import tf_optimizers as tfo
from tf_optimizers.compression.schedule import SparsitySchedule, recommended
from tf_optimizers.demo.data import SPLIT_SIZES, prepare
from tf_optimizers.demo.parts import Settings
from tf_optimizers.demo.processes import run_workers
from tf_optimizers.demo.trainer import WARMUP_SHARE, MakeOptimizer

WORKER = "tf_optimizers.demo.gradient_compression.worker"

MOMENTUM = 0.9

# Dense -> compressed, which uses the learning rate of the dense one.
PAIRS = {"SGD": "tfo.DGCMomentum", "AdamW": "tfo.SparseLoCo"}

# Several times what two slow cores need.
SECONDS_PER_RUN = 60.0
SECONDS_TO_START = 240.0


@dataclass(frozen=True)
class Plan:
    """The size of the study."""

    epochs: int
    rates: dict[str, tuple[float, ...]]  # The grid of each dense optimizer.
    tuning_seeds: tuple[int, ...]
    max_seeds: int
    batch_size: int = 128
    hidden_units: tuple[int, ...] = (1024, 512, 64)
    workers: int = 2

    @property
    def steps_per_epoch(self) -> int:
        """The batch size divides the number of images."""
        return SPLIT_SIZES["train"] // self.batch_size

    @property
    def steps(self) -> int:
        """Optimizer steps of a run."""
        return self.epochs * self.steps_per_epoch

    @property
    def schedule(self) -> SparsitySchedule:
        """The sparsity of each step."""
        return SparsitySchedule(**recommended(self.steps))

    @property
    def steady_epochs(self) -> tuple[int, int]:
        """The first epoch, from 0, of the highest sparsity, and the end."""
        count, stages = self.steps_per_epoch, self.schedule.stages
        shares = [stages[self.schedule.stage(s)] for s in range(self.steps)]
        highest = max(share or 0.0 for share in shares)
        steady = [
            epoch
            for epoch in range(self.epochs)
            if set(shares[count * epoch : count * (epoch + 1)]) == {highest}
        ]
        return steady[0], steady[-1] + 1


FULL = Plan(
    epochs=16,
    rates={
        "SGD": tuple(2.0**k for k in range(-7, -2)),
        "AdamW": tuple(2.0**k for k in range(-10, -5)),
    },
    tuning_seeds=(10_001, 10_002),
    max_seeds=4,
)
QUICK = Plan(
    epochs=6,
    rates={"SGD": (2.0**-4,), "AdamW": (2.0**-9,)},
    tuning_seeds=(10_001,),
    max_seeds=2,
    hidden_units=(512, 64),
)


def make_optimizers(plan: Plan) -> dict[str, MakeOptimizer]:
    """Return all optimizers by name, each made from a learning rate."""
    return {
        "SGD": lambda rate: keras.optimizers.SGD(rate, momentum=MOMENTUM),
        "tfo.DGCMomentum": lambda rate: tfo.DGCMomentum.for_steps(
            plan.steps, rate, momentum=MOMENTUM
        ),
        "AdamW": keras.optimizers.AdamW,
        "tfo.SparseLoCo": lambda rate: tfo.SparseLoCo.for_steps(
            plan.steps, keras.optimizers.AdamW(rate)
        ),
    }


def run(settings: Settings, progress: tqdm) -> dict[str, Any]:
    """Run the study; the result holds plain numbers, ready for JSON."""
    plan = QUICK if settings.quick else FULL
    seeds = tuple(range(min(settings.seeds, plan.max_seeds)))
    trials = len(plan.tuning_seeds) * sum(map(len, plan.rates.values()))
    runs = trials + 2 * len(PAIRS) * len(seeds)
    progress.reset(runs)
    progress.set_description_str("starting workers")
    # Not in the workers, which would write the same files.
    prepare(settings.data_dir)
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task.json"
        outcome = Path(folder) / "outcome.json"
        contents = {
            "quick": settings.quick,
            "seeds": seeds,
            "data_dir": str(settings.data_dir.absolute()),
            "outcome": str(outcome),
        }
        task.write_text(json.dumps(contents), encoding="utf-8")
        limit = SECONDS_TO_START + runs * SECONDS_PER_RUN
        run_workers([WORKER, str(task)], plan.workers, limit, progress)
        result = json.loads(outcome.read_text(encoding="utf-8"))
    return {
        "settings": {
            **asdict(plan),
            "seeds": seeds,
            "steps_per_epoch": plan.steps_per_epoch,
            "steady_epochs": plan.steady_epochs,
            "warmup_share": WARMUP_SHARE,
            "sparsity": plan.schedule.sparsity,
            "momentum": MOMENTUM,
            "split_sizes": SPLIT_SIZES,
        },
        "parameters": result["parameters"],
        "pairs": [
            {
                "optimizers": [
                    optimizer_row(name, pair["runs"], plan)
                    for name in (pair["tuned"], PAIRS[pair["tuned"]])
                ],
                **pair,
            }
            for pair in result["pairs"]
        ],
    }


def optimizer_row(
    name: str, runs: list[dict[str, Any]], plan: Plan
) -> dict[str, Any]:
    """Return an optimizer's row: over its seeds, and its steady epochs.

    Args:
        name: The optimizer.
        runs: Runs of several optimizers, as a worker returns them.
        plan: The plan of these runs.
    """
    own = [run for run in runs if run["optimizer"] == name]
    accuracies = [run["test_accuracy"] for run in own]
    counted = np.array([run["bytes_per_step"] for run in own], float)
    seconds = np.array([run["seconds_per_step"] for run in own])
    steady = np.s_[:, slice(*plan.steady_epochs)]
    return {
        "optimizer": name,
        "mean": float(np.mean(accuracies)),
        "std": float(np.std(accuracies, ddof=1)),
        "final_loss": float(np.mean([run["loss"][-1] for run in own])),
        "bytes_per_step": _or_none(np.median(counted[steady])),
        "bytes_per_run": _or_none(
            plan.steps_per_epoch * np.mean(counted.sum(axis=1))
        ),
        "seconds_per_step": float(np.median(seconds[steady])),
    }


def _or_none(count: np.floating) -> float | None:
    """Return None for a count that is missing, or that did not move."""
    return float(count) if count > 0 else None
