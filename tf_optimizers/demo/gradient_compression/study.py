"""The gradient compression study: what DGC saves, and what it costs.

Two worker processes, which run `worker.py`, train with dense momentum SGD and
with DGC. The learning rate is chosen for the dense one, by mean validation
accuracy. Both then train networks with fresh seeds at that rate, and only those
see the test split.
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
from tf_optimizers.demo.data import SPLIT_SIZES, prepare
from tf_optimizers.demo.parts import Settings
from tf_optimizers.demo.processes import run_workers
from tf_optimizers.demo.trainer import WARMUP_SHARE, MakeOptimizer

WORKER = "tf_optimizers.demo.gradient_compression.worker"

# The paper's warm-up, one epoch each, and the final sparsity.
SPARSITY = (0.75, 0.9375, 0.984375, 0.996, 0.999)
MOMENTUM = 0.9

# Several times what two slow cores need.
SECONDS_PER_RUN = 60.0
SECONDS_TO_START = 240.0


@dataclass(frozen=True)
class Plan:
    """The size of the study."""

    epochs: int
    rates: tuple[float, ...]
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
    def warmup_epochs(self) -> int:
        """Epochs before the final sparsity."""
        return len(SPARSITY) - 1


FULL = Plan(
    epochs=16,
    rates=tuple(2.0**k for k in range(-5, -1)),
    tuning_seeds=(10_001, 10_002),
    max_seeds=4,
)
QUICK = Plan(
    epochs=6,
    rates=(2.0**-4,),
    tuning_seeds=(10_001,),
    max_seeds=2,
    hidden_units=(512, 64),
)


def make_optimizers(plan: Plan) -> dict[str, MakeOptimizer]:
    """Return the dense optimizer, whose learning rate is tuned, and DGC."""
    return {
        "SGD": lambda rate: keras.optimizers.SGD(rate, momentum=MOMENTUM),
        "tfo.DGCMomentum": lambda rate: tfo.DGCMomentum(
            rate,
            momentum=MOMENTUM,
            rampup_step=len(SPARSITY) * plan.steps_per_epoch,
            sparsity=SPARSITY,
            rate_in_momentum=False,
        ),
    }


def run(settings: Settings, progress: tqdm) -> dict[str, Any]:
    """Run the study; the result holds plain numbers, ready for JSON."""
    plan = QUICK if settings.quick else FULL
    seeds = tuple(range(min(settings.seeds, plan.max_seeds)))
    names = list(make_optimizers(plan))
    runs = len(plan.rates) * len(plan.tuning_seeds) + len(names) * len(seeds)
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
            "warmup_epochs": plan.warmup_epochs,
            "warmup_share": WARMUP_SHARE,
            "sparsity": SPARSITY,
            "momentum": MOMENTUM,
            "split_sizes": SPLIT_SIZES,
        },
        "optimizers": [
            optimizer_row(name, result["runs"], plan) for name in names
        ],
        **result,
    }


def optimizer_row(
    name: str, runs: list[dict[str, Any]], plan: Plan
) -> dict[str, Any]:
    """Return an optimizer's row, over its seeds and its epochs after warm-up.

    Args:
        name: The optimizer.
        runs: The runs of all optimizers, as a worker returns them.
        plan: The plan of these runs.
    """
    own = [run for run in runs if run["optimizer"] == name]
    accuracies = [run["test_accuracy"] for run in own]
    counted = np.array([run["bytes_per_step"] for run in own], float)
    seconds = np.array([run["seconds_per_step"] for run in own])
    steady = np.s_[:, plan.warmup_epochs :]
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
