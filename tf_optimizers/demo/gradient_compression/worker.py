"""One worker of the gradient compression study.

The study starts two of them with the launcher:

    python -m tf_optimizers.launch --workers 2 \
        -m tf_optimizers.demo.gradient_compression.worker task.json

All workers do everything below together; the first one reports.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.agreement.statements import (
    check_agreement,
    gather_statements,
)
from tf_optimizers.demo.data import load_splits, shuffled_batches, whole
from tf_optimizers.demo.gradient_compression.study import (
    FULL,
    PAIRS,
    QUICK,
    Plan,
    make_optimizers,
)
from tf_optimizers.demo.network import build_model, initial_weights
from tf_optimizers.demo.processes import BEGIN, END
from tf_optimizers.demo.results import write_json
from tf_optimizers.demo.sockets import sent_bytes
from tf_optimizers.demo.trainer import Trainer
from tf_optimizers.demo.tuning import tune


def main(task_path: str) -> None:
    """Do the task; write its outcome if this is the first worker."""
    # First of all, since it must precede any tensor.
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    # Only once, since it discards all compiled kernels. Each run's weights and
    # shuffles have seeds of their own, which TensorFlow mixes with this one.
    keras.utils.set_random_seed(0)
    task = json.loads(Path(task_path).read_text(encoding="utf-8"))
    plan = QUICK if task["quick"] else FULL
    is_first = not strategy.cluster_resolver.task_id
    data = load_splits(Path(task["data_dir"]))
    outcome = SharedStudy(strategy, plan, data, is_first).work(task["seeds"])
    if is_first:
        write_json(outcome, Path(task["outcome"]))


class SharedStudy:
    """The study, which all workers run together, with a model per optimizer.

    Args:
        strategy: The strategy of all workers.
        plan: What they do.
        data: The splits as `load_splits` returns them.
        is_first: Whether this worker reports the progress.
    """

    def __init__(
        self,
        strategy: tfo.SparseMultiWorkerMirroredStrategy,
        plan: Plan,
        data: dict[str, tf.data.Dataset],
        is_first: bool,
    ) -> None:
        self.strategy = strategy
        self.plan = plan
        self.is_first = is_first
        self.train_data = data["train"]
        self.held_out = {
            name: whole(data[name]) for name in ("validation", "test")
        }
        with strategy.scope():
            self.trainers = {
                name: Trainer(build_model(0, plan.hidden_units), make_optimizer)
                for name, make_optimizer in make_optimizers(plan).items()
            }

    def work(self, seeds: list[int]) -> dict[str, Any]:
        """Tune each dense optimizer, then train with all of them."""
        return {
            "parameters": self.trainers["SGD"].model.count_params(),
            "pairs": [self._compare(dense, seeds) for dense in PAIRS],
        }

    def _compare(self, dense: str, seeds: list[int]) -> dict[str, Any]:
        def validate(rate: float, seed: int) -> float:
            self._train(dense, rate, seed, f"learning rate {rate:.3g}")
            return self.trainers[dense].accuracy(*self.held_out["validation"])

        rates, compressed = self.plan.rates[dense], PAIRS[dense]
        tuned = tune(rates, self.plan.tuning_seeds, validate)
        runs = [
            self._test(name, tuned["learning_rate"], seed)
            for name in (dense, compressed)
            for seed in seeds
        ]
        optimizer = self.trainers[compressed].optimizer
        return {
            "tuned": dense,
            **tuned,
            "runs": runs,
            "communication": optimizer.communication_summary(
                self.plan.steps_per_epoch * self.plan.steady_epochs[0]
            ),
        }

    def _test(self, name: str, rate: float, seed: int) -> dict[str, Any]:
        recorder = self._train(name, rate, seed, f"seed {seed}")
        accuracy = self.trainers[name].accuracy(*self.held_out["test"])
        return {
            "optimizer": name,
            "seed": seed,
            "loss": recorder.loss,
            "bytes_per_step": recorder.bytes_per_step,
            "seconds_per_step": recorder.seconds_per_step,
            "test_accuracy": accuracy,
        }

    def _train(
        self, name: str, rate: float, seed: int, title: str
    ) -> "EpochRecorder":
        self._say(f"{BEGIN}{name}, {title}")
        plan = self.plan
        trainer = self.trainers[name]
        weights = initial_weights(seed, plan.hidden_units)
        trainer.reset(weights, rate, plan.steps)
        recorder = EpochRecorder(self.strategy, plan)
        trainer.model.fit(
            self._batches(seed),
            epochs=plan.epochs,
            steps_per_epoch=plan.steps_per_epoch,
            shuffle=False,
            verbose=0,
            callbacks=[recorder],
        )
        self._say(f"{END}{name}, {title}")
        return recorder

    def _batches(self, seed: int) -> tf.data.Dataset:
        """Return global batches; the strategy gives each worker its part."""
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        batches = shuffled_batches(self.train_data, self.plan.batch_size, seed)
        return batches.with_options(options)

    def _say(self, text: str) -> None:
        if self.is_first:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


class EpochRecorder(keras.callbacks.Callback):
    """Records each epoch's loss, and its bytes and time per step.

    Args:
        strategy: The strategy of all workers.
        plan: What they do.
    """

    def __init__(
        self, strategy: tfo.SparseMultiWorkerMirroredStrategy, plan: Plan
    ) -> None:
        super().__init__()
        self.strategy = strategy
        self.plan = plan
        self.loss: list[float] = []
        self.bytes_per_step: list[float | None] = []
        self.seconds_per_step: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Read the counter and the clock before any worker starts."""
        self._meet(epoch)
        self._bytes = sent_bytes()
        self._time = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Read them again after all workers have finished."""
        steps = self.plan.steps_per_epoch
        self.seconds_per_step.append((time.monotonic() - self._time) / steps)
        self._meet(epoch)
        self.bytes_per_step.append(self._mean_bytes(sent_bytes(), steps))
        self.loss.append(float(logs["loss"]))

    def _mean_bytes(self, sent: int | None, steps: int) -> float | None:
        """Return the bytes that a worker sent per step, on average."""
        if sent is None or self._bytes is None:
            return None
        subject, own = "the bytes of an epoch", sent - self._bytes
        counts = gather_statements(self.strategy, subject, own)
        return sum(counts) / len(counts) / steps

    def _meet(self, epoch: int) -> None:
        """Wait until all workers are here: they compare the epoch."""
        check_agreement(self.strategy, "an epoch", {"epoch": epoch})


if __name__ == "__main__":
    main(sys.argv[1])
