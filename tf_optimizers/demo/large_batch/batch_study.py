"""The large-batch study: the accuracy of optimizers after a few large batches.

For each cell (optimizer x batch size x epochs), the mean validation accuracy
over the tuning seeds decides the learning rate. Networks with new seeds then
train at that rate. Only these networks see the test split.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

import tf_optimizers as tfo
from tf_optimizers.demo.data import (
    SPLIT_SIZES,
    load_splits,
    shuffled_batches,
    whole,
)
from tf_optimizers.demo.network import (
    HIDDEN_UNITS,
    LAST,
    build_model,
    initial_weights,
)
from tf_optimizers.demo.parts import Settings
from tf_optimizers.demo.trainer import WARMUP_SHARE, MakeOptimizer, Trainer
from tf_optimizers.demo.tuning import tune

WEIGHT_DECAY = 0.01


def muon(rate: Any) -> keras.optimizers.Optimizer:
    """Return Muon, with AdamW for biases and the last layer.

    Keras's documentation recommends this combination.
    """
    optimizer = keras.optimizers.Muon(
        rate, weight_decay=WEIGHT_DECAY, exclude_layers=[LAST]
    )
    # In Keras 3.10, the constructor does not have this argument.
    optimizer.adam_weight_decay = WEIGHT_DECAY
    return optimizer


# The optimizers to compare, with defaults for all other arguments.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda rate: keras.optimizers.SGD(rate, momentum=0.9, nesterov=True),
    "AdamW": lambda rate: keras.optimizers.AdamW(
        rate, weight_decay=WEIGHT_DECAY
    ),
    "Keras Lamb": lambda rate: keras.optimizers.Lamb(
        rate, weight_decay=WEIGHT_DECAY
    ),
    "tfo.Lamb": lambda rate: tfo.Lamb(rate, weight_decay=WEIGHT_DECAY),
    "tfo.LANS": lambda rate: tfo.LANS(rate, weight_decay=WEIGHT_DECAY),
    "Keras Muon": muon,
}

TRAIN_SIZE = SPLIT_SIZES["train"]


@dataclass(frozen=True)
class Budget:
    """A batch size and a number of epochs."""

    batch_size: int
    epochs: int

    @property
    def steps(self) -> int:
        """The number of steps. The batch size must divide `TRAIN_SIZE`."""
        return TRAIN_SIZE // self.batch_size * self.epochs


@dataclass(frozen=True)
class Plan:
    """The size of the study."""

    budgets: tuple[Budget, ...]
    rates: tuple[float, ...]
    tuning_seeds: tuple[int, ...]

    @property
    def curve_budget(self) -> Budget:
        """The budget that is measured after every step, for the plots."""
        return self.budgets[-1]


FULL = Plan(
    budgets=(
        Budget(256, 10),
        Budget(TRAIN_SIZE, 10),
        Budget(TRAIN_SIZE, 30),
    ),
    rates=tuple(2.0**k for k in range(-7, 0)),
    tuning_seeds=(10_001, 10_002),
)
QUICK = Plan(
    budgets=(Budget(256, 3), Budget(TRAIN_SIZE, 3), Budget(TRAIN_SIZE, 10)),
    rates=(2.0**-6, 2.0**-4, 2.0**-2),
    tuning_seeds=(10_001,),
)


def run(settings: Settings, progress: tqdm) -> dict[str, Any]:
    """Run the study; the result is ready for JSON."""
    plan = QUICK if settings.quick else FULL
    first = settings.first_seed
    seeds = tuple(range(first, first + settings.seeds))
    runs = len(plan.rates) * len(plan.tuning_seeds) + len(seeds)
    progress.reset(len(OPTIMIZERS) * len(plan.budgets) * runs)
    # TensorFlow combines this seed with the seeds of the shuffles.
    keras.utils.set_random_seed(0)
    study = Study(plan, seeds, load_splits(settings.data_dir), progress)
    return {
        "settings": {
            **asdict(plan),
            "seeds": seeds,
            "split_sizes": SPLIT_SIZES,
            "hidden_units": HIDDEN_UNITS,
            "warmup_share": WARMUP_SHARE,
            "weight_decay": WEIGHT_DECAY,
        },
        "cells": [
            study.cell(name, trainer, budget)
            for name, make_optimizer in OPTIMIZERS.items()
            for trainer in [Trainer(build_model(0), make_optimizer)]
            for budget in plan.budgets
        ],
    }


class StepRecorder(keras.callbacks.Callback):
    """Records the training loss and the result of `measure()` at every step."""

    def __init__(self, measure: Callable[[], float]) -> None:
        super().__init__()
        self.measure = measure
        self.loss: list[float] = []
        self.accuracy: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Reset metrics, which Keras would average over batches."""
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Record the loss of this step, and the accuracy after it."""
        self.loss.append(float(logs["loss"]))
        self.accuracy.append(self.measure())


class Study:
    """Tunes and tests the cells of the study."""

    def __init__(
        self,
        plan: Plan,
        seeds: tuple[int, ...],
        data: dict[str, tf.data.Dataset],
        progress: tqdm,
    ) -> None:
        """Store the settings, and `data`, the result of `load_splits`."""
        self.plan = plan
        self.seeds = seeds
        self.progress = progress
        self.train_data = data["train"]
        self.held_out = {
            name: whole(data[name]) for name in ("validation", "test")
        }

    def cell(
        self, name: str, trainer: Trainer, budget: Budget
    ) -> dict[str, Any]:
        """Tune and test one optimizer with one budget."""
        self.progress.set_description_str(
            f"{name}, batch {budget.batch_size}, {budget.steps} steps"
        )

        def validate(rate: float, seed: int) -> float:
            self._train(trainer, budget, rate, seed)
            return trainer.accuracy(*self.held_out["validation"])

        tuned = tune(self.plan.rates, self.plan.tuning_seeds, validate)
        rate = tuned["learning_rate"]
        accuracies, curves = self._test(trainer, budget, rate)
        return {
            "optimizer": name,
            **asdict(budget),
            "steps": budget.steps,
            **tuned,
            "test_accuracy": accuracies,
            "mean": float(np.mean(accuracies)),
            "std": float(np.std(accuracies, ddof=1)),
            "curves": curves,
        }

    def _test(
        self, trainer: Trainer, budget: Budget, rate: float
    ) -> tuple[list[float], dict[str, list[list[float]]]]:
        def measure() -> float:
            return trainer.accuracy(*self.held_out["test"])

        accuracies = []
        curves: dict[str, list[list[float]]] = {"loss": [], "accuracy": []}
        for seed in self.seeds:
            recorder = StepRecorder(measure)
            # Measuring after every step is slow, so only one budget has curves.
            recorded = budget == self.plan.curve_budget
            callbacks = [recorder] if recorded else []
            self._train(trainer, budget, rate, seed, callbacks)
            accuracies.append(measure())
            if recorded:
                curves["loss"].append(recorder.loss)
                curves["accuracy"].append(recorder.accuracy)
        return accuracies, curves

    def _train(
        self,
        trainer: Trainer,
        budget: Budget,
        rate: float,
        seed: int,
        callbacks: Sequence[StepRecorder] = (),
    ) -> None:
        data = shuffled_batches(self.train_data, budget.batch_size, seed)
        weights = initial_weights(seed)
        trainer.train(data, weights, rate, budget.steps, callbacks)
        self.progress.update()
