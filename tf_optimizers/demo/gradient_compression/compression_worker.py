"""One worker of the gradient compression study.

The study starts two workers with the launcher:

    python -m tf_optimizers.launch --workers 2 \
        -m tf_optimizers.demo.gradient_compression.compression_worker task.json

All workers run this module together. The first worker reports.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.demo.data import load_splits, shuffled_batches, whole
from tf_optimizers.demo.gradient_compression.compression_study import (
    COMPRESSED,
    FULL,
    QUICK,
    Plan,
    make_optimizers,
)
from tf_optimizers.demo.link import NONE, Forwarder, Link, join, parse_link
from tf_optimizers.demo.network import build_model, initial_weights
from tf_optimizers.demo.processes import BEGIN, END
from tf_optimizers.demo.results import write_json
from tf_optimizers.demo.sockets import sent_bytes
from tf_optimizers.demo.trainer import Trainer

PACE = 8  # From this step on, the progress bar shows the seconds left.


def main(task_path: str) -> None:
    """Run the task; the first worker writes the outcome."""
    task = json.loads(Path(task_path).read_text(encoding="utf-8"))
    link = parse_link(task["link"])
    # The forwarder must be created before the strategy, and the strategy before
    # any tensor.
    forwarder = None if link == NONE else join()
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    # Set this seed only once: setting it clears TensorFlow's caches.
    # TensorFlow combines it with the seed of each run's shuffle.
    keras.utils.set_random_seed(0)
    plan = QUICK if task["quick"] else FULL
    is_first = not strategy.cluster_resolver.task_id
    data = load_splits(Path(task["data_dir"]))
    study = SharedStudy(strategy, forwarder, plan, data, is_first)
    outcome = study.work(task["seeds"], task["rates"], link)
    if is_first:
        write_json(outcome, Path(task["outcome"]))


class SharedStudy:
    """The study that all workers run together, with one model per optimizer.

    Args:
        strategy: The strategy of all workers.
        forwarder: This worker's forwarder, or None without a link.
        plan: The size of the study.
        data: The splits as `load_splits` returns them.
        is_first: Whether this worker reports the progress.
    """

    def __init__(
        self,
        strategy: tfo.SparseMultiWorkerMirroredStrategy,
        forwarder: Forwarder | None,
        plan: Plan,
        data: dict[str, tf.data.Dataset],
        is_first: bool,
    ) -> None:
        self.strategy = strategy
        self.forwarder = forwarder
        self.plan = plan
        self.is_first = is_first
        self.train_data = data["train"]
        images, labels = whole(data["test"])
        self.test_size = len(labels)
        # All workers have the same weights when accuracy is measured, so each
        # worker classifies only a part of the test images.
        own = slice(strategy.cluster_resolver.task_id, None, plan.workers)
        self.test = images[own], labels[own]
        with strategy.scope():
            self.trainers = {
                name: Trainer(build_model(0, plan.hidden_units), make_optimizer)
                for name, make_optimizer in make_optimizers(plan).items()
            }

    def work(
        self, seeds: list[int], rates: dict[str, float], link: Link
    ) -> dict[str, Any]:
        """Train with all optimizers; only the first seed uses the link."""
        runs: dict[str, list[dict[str, Any]]] = {}
        for name, rate in rates.items():
            self._train(name, rate, seeds[0], 2, [])  # Trace a step.
            runs[name] = [
                self._test(name, rate, seed, link if seed == seeds[0] else NONE)
                for seed in seeds
            ]
        return {
            "parameters": self.trainers["SGD"].model.count_params(),
            "runs": runs,
        }

    def _test(
        self, name: str, rate: float, seed: int, link: Link
    ) -> dict[str, Any]:
        where = "no link" if link == NONE else str(link)
        title = f"{where}: {name}, seed {seed}"
        self._say(BEGIN + title)
        # Dense steps over the link are slow. They all take the same time, so
        # time only a few of them.
        steps, over_link = self.plan.steps, 0
        if link != NONE:
            over_link = self.plan.timed_steps if name in COMPRESSED else steps

        def at_mark(done: int, pace: float) -> None:
            if done == over_link:
                self._set(NONE)
            last = steps if done >= over_link else over_link
            if done >= PACE:
                left = (last - done) * pace
                self._say(f"{BEGIN}{title}, {left:.0f} s left")

        recorder = Recorder(
            self.plan.measured_after(name),
            lambda: self.trainers[name].count_correct(*self.test),
            at_mark,
        )
        self._set(link)
        self._train(name, rate, seed, steps, [recorder])
        self._say(END + title)
        accuracy = self._over_workers(recorder.correct) / self.test_size
        return {
            "seed": seed,
            "over_link": over_link,
            "accuracy": accuracy.tolist(),
            **recorder.marks,
        }

    def _over_workers(self, counts: list[int]) -> np.ndarray:
        """Return the sums of all workers' counts."""

        def add() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            own = tf.constant(counts, "float64")
            return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

        return self.strategy.run(add).numpy()

    def _set(self, link: Link) -> None:
        if self.forwarder is not None:
            self.forwarder.set(link)

    def _train(
        self,
        name: str,
        rate: float,
        seed: int,
        steps: int,
        callbacks: list[keras.callbacks.Callback],
    ) -> None:
        plan = self.plan
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        # These are global batches; the strategy gives each worker its part.
        batches = shuffled_batches(self.train_data, plan.batch_size, seed)
        self.trainers[name].train(
            batches.with_options(options),
            initial_weights(seed, plan.hidden_units),
            rate,
            steps,
            callbacks,
        )

    def _say(self, text: str) -> None:
        if self.is_first:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


class Recorder(keras.callbacks.Callback):
    """Records steps, seconds and bytes between marks, and accuracy at marks.

    A mark is the end of a step. At a mark, the clock stops while `measure` and
    `at_mark` run.

    Args:
        every: Steps between two marks.
        measure: Returns how many test images are classified correctly.
        at_mark: Called with the number of finished steps, and the seconds per
            step since the previous mark.
    """

    def __init__(
        self,
        every: int,
        measure: Callable[[], int],
        at_mark: Callable[[int, float], None],
    ) -> None:
        super().__init__()
        self.every = every
        self.measure = measure
        self.at_mark = at_mark
        self.correct: list[int] = []
        self.marks: dict[str, Any] = {
            "steps": [],
            "seconds": [],
            "bytes": [],
        }

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start the clock at the first step."""
        if batch == 0:
            self._bytes = sent_bytes()
            self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """At a mark, stop the clock, record, and start the clock again."""
        every, done = self.every, batch + 1
        if done % every:
            return
        seconds, sent = time.perf_counter() - self._start, sent_bytes()
        self.marks["steps"].append(every)
        self.marks["seconds"].append(seconds)
        if sent is None or self._bytes is None:
            self.marks["bytes"] = None
        else:
            self.marks["bytes"].append(sent - self._bytes)
        self.correct.append(self.measure())
        self.at_mark(done, seconds / every)
        self._bytes = sent_bytes()
        self._start = time.perf_counter()


if __name__ == "__main__":
    main(sys.argv[1])
