"""The gradient compression study: seconds of training on a slow network.

Momentum SGD and AdamW train with dense and with compressed exchanges. This
process chooses the learning rates of the dense optimizers, on several splits.
Two worker processes (`compression_worker.py`) then train with all optimizers at
these rates, with new seeds. Only the runs with the first seed are timed over a
simulated link. Dense runs use the link only for their first steps, because all
dense steps take the same time. Only the workers see the test split.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

import tf_optimizers as tfo
from tf_optimizers.compression.sparsity_schedule import (
    VALUE_DTYPE,
    SparsitySchedule,
    recommended_schedule,
)
from tf_optimizers.demo.data import (
    SPLIT_SIZES,
    load_splits,
    shuffled_batches,
    whole,
)
from tf_optimizers.demo.gradient_compression.clock import summary
from tf_optimizers.demo.link import NONE
from tf_optimizers.demo.network import build_model, initial_weights
from tf_optimizers.demo.parts import Settings
from tf_optimizers.demo.probe import measure
from tf_optimizers.demo.processes import run_workers
from tf_optimizers.demo.trainer import WARMUP_SHARE, MakeOptimizer, Trainer
from tf_optimizers.demo.tuning import tune

WORKER = "tf_optimizers.demo.gradient_compression.compression_worker"

MOMENTUM = 0.9

# Local steps between two exchanges of the optimizer `LOCAL`.
LOCAL_STEPS = 8
LOCAL = f"SparseLoCo, {LOCAL_STEPS} local steps"

# The compressed counterparts of each dense optimizer, with the same learning
# rate.
COMPRESSED = {"SGD": ("DGCMomentum",), "AdamW": ("SparseLoCo", LOCAL)}

# Time limits in seconds, several times as long as two slow cores need without a
# link.
SECONDS_PER_RUN = 60.0
SECONDS_TO_START = 240.0


@dataclass(frozen=True)
class Plan:
    """The size of the study."""

    steps: int
    rates: dict[str, tuple[float, ...]]  # The grid of each dense optimizer.
    tuning_seeds: tuple[int, ...]
    max_seeds: int
    batch_size: int = 96
    hidden_units: tuple[int, ...] = (1280, 1600, 64)
    workers: int = 2
    measured_every: int = 4  # Steps between two measurements.
    timed_steps: int = 16  # Dense steps over the link.

    def measured_after(self, optimizer: str) -> int:
        """Return the steps between two measurements of an optimizer."""
        return LOCAL_STEPS if optimizer == LOCAL else self.measured_every

    @property
    def schedule(self) -> SparsitySchedule:
        """The sparsity of each step."""
        return SparsitySchedule(**recommended_schedule(self.steps))


FULL = Plan(
    steps=96,
    rates={
        "SGD": tuple(2.0**k for k in (-6, -4, -2)),
        "AdamW": tuple(2.0**k for k in (-11, -9, -7, -5)),
    },
    tuning_seeds=(10_001, 10_002, 10_003),
    max_seeds=5,
)
QUICK = Plan(
    steps=48,
    rates={"SGD": (2.0**-4,), "AdamW": (2.0**-9,)},
    tuning_seeds=(10_001,),
    max_seeds=2,
    hidden_units=(512, 64),
)


def make_optimizers(plan: Plan) -> dict[str, MakeOptimizer]:
    """Return functions from a learning rate to an optimizer, by name."""
    return {
        "SGD": lambda rate: keras.optimizers.SGD(rate, momentum=MOMENTUM),
        "DGCMomentum": lambda rate: tfo.DGCMomentum.for_steps(
            plan.steps, rate, momentum=MOMENTUM
        ),
        "AdamW": keras.optimizers.AdamW,
        "SparseLoCo": lambda rate: tfo.SparseLoCo.for_steps(
            plan.steps, keras.optimizers.AdamW(rate)
        ),
        LOCAL: lambda rate: tfo.SparseLoCo.for_steps(
            plan.steps, keras.optimizers.AdamW(rate), sync_every=LOCAL_STEPS
        ),
    }


def run(settings: Settings, progress: tqdm) -> dict[str, Any]:
    """Run the study; the result is ready for JSON."""
    plan = QUICK if settings.quick else FULL
    first = settings.first_seed
    seeds = range(first, first + min(settings.seeds, plan.max_seeds))
    trials = len(plan.tuning_seeds) * sum(map(len, plan.rates.values()))
    progress.reset(trials + len(make_optimizers(plan)) * len(seeds))
    measured = NONE
    if settings.link != NONE:
        progress.set_description_str(f"measuring {settings.link}")
        measured = measure(settings.link)
    tuned = choose_rates(plan, settings, progress)
    progress.set_description_str("starting workers")
    task = {
        "quick": settings.quick,
        "seeds": list(seeds),
        "link": str(settings.link),
        "rates": {
            name: tuned[dense]["learning_rate"]
            for dense, compressed in COMPRESSED.items()
            for name in (dense, *compressed)
        },
        "data_dir": str(settings.data_dir.absolute()),
    }
    outcome = work(task, plan, progress)
    runs = outcome["runs"]
    return {
        "settings": {
            **asdict(plan),
            "seeds": list(seeds),
            "warmup_share": WARMUP_SHARE,
            "sparsity": plan.schedule.sparsity,
            "local_steps": LOCAL_STEPS,
            "momentum": MOMENTUM,
            "value_dtype": VALUE_DTYPE,
            "split_sizes": SPLIT_SIZES,
            "link": str(settings.link),
        },
        "parameters": outcome["parameters"],
        "measured": None if measured == NONE else measured._asdict(),
        "groups": [
            {
                "tuned": dense,
                **tuned[dense],
                "optimizers": [
                    {"optimizer": name, **summary(runs[name], measured)}
                    for name in (dense, *compressed)
                ],
            }
            for dense, compressed in COMPRESSED.items()
        ],
    }


def choose_rates(
    plan: Plan, settings: Settings, progress: tqdm
) -> dict[str, dict[str, Any]]:
    """Return the learning rate of each dense optimizer, and all trials.

    One process is enough, because without compression, several workers would
    get the same results.
    """
    keras.utils.set_random_seed(0)
    data = load_splits(settings.data_dir)
    parts = [whole(data[name]) for name in ("train", "validation")]
    images, labels = map(np.concatenate, zip(*parts, strict=True))
    tuned = {}
    for name in COMPRESSED:
        trainer = Trainer(
            build_model(0, plan.hidden_units), make_optimizers(plan)[name]
        )
        validate = _validator(name, trainer, plan, images, labels, progress)
        tuned[name] = tune(plan.rates[name], plan.tuning_seeds, validate)
    return tuned


def _validator(
    name: str,
    trainer: Trainer,
    plan: Plan,
    images: np.ndarray,
    labels: np.ndarray,
    progress: tqdm,
) -> Callable[[float, int], float]:
    """Return a function (rate, seed) -> validation accuracy.

    The seed decides the split, the initial weights and the order of the data.
    """

    def validate(rate: float, seed: int) -> float:
        progress.set_description_str(f"{name}, learning rate {rate:.3g}")
        order = np.random.default_rng(seed).permutation(len(images))
        ours, held_out = np.split(order, [SPLIT_SIZES["train"]])
        train = tf.data.Dataset.from_tensor_slices((images[ours], labels[ours]))
        trainer.train(
            shuffled_batches(train, plan.batch_size, seed),
            initial_weights(seed, plan.hidden_units),
            rate,
            plan.steps,
        )
        progress.update()
        return trainer.accuracy(images[held_out], labels[held_out])

    return validate


def work(task: dict[str, Any], plan: Plan, progress: tqdm) -> dict[str, Any]:
    """Run a task on the workers; return the first worker's outcome."""
    with tempfile.TemporaryDirectory() as folder:
        path, outcome = Path(folder) / "task.json", Path(folder) / "outcome"
        path.write_text(json.dumps({**task, "outcome": str(outcome)}))
        limit = SECONDS_TO_START + progress.total * SECONDS_PER_RUN
        run_workers([WORKER, str(path)], plan.workers, limit, progress)
        return json.loads(outcome.read_text())
