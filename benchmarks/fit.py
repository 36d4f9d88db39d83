"""What does `fit` cost on several workers, in addition to the steps?

    python benchmarks/fit.py [--workers 2] [--rounds 5] [--steps 100]

`model.fit` and a custom loop train the same small model on the same batches,
under the same strategy in the same processes, and take turns. Both keep the
same metrics. `fit` reduces metrics over the workers in every step, for its
logs; the custom loop reduces them once per round. A third contender is `fit`
without the comparison of batches between workers. Times are the first worker's,
from the end of one step to the end of the next. They include callbacks, but not
the work of `fit` per call or per epoch. A batch has vectors, or 38 MB of
images.
"""

import argparse
import json
import os
import pathlib
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import launched
import numpy as np
import results
import tables
import tensorflow as tf

import tf_optimizers as tfo

WIDTH, CLASSES, BATCH = 64, 10, 64
IMAGE = (224, 224, 3)
TASKS = {
    "SGD": ((), lambda: keras.optimizers.SGD(1e-3, momentum=0.9)),
    "DGCMomentum": (
        (),
        lambda: tfo.DGCMomentum(1e-3, min_compress_size=1024),
    ),
    "SGD, 64 images of 224 x 224": (
        IMAGE,
        lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    ),
}


def make_model(
    width: int,
    optimizer: keras.optimizers.Optimizer,
    image: tuple[int, ...] = (),
) -> keras.Model:
    pooled = [keras.layers.GlobalAveragePooling2D()] if image else []
    model = keras.Sequential(
        [
            keras.Input(image or (width,)),
            *pooled,
            keras.layers.Dense(width, "relu"),
            keras.layers.Dense(width, "relu"),
            keras.layers.Dense(CLASSES),
        ]
    )
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class Clock(keras.callbacks.Callback):
    """Records the time between the ends of consecutive steps, in ms."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self._last = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the time since the previous step."""
        now = time.perf_counter()
        if batch:
            self.times.append(1e3 * (now - self._last))
        self._last = now


class CustomLoop:
    """The training loop of TensorFlow's guide to distributed training."""

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy):
        self.model, self.strategy = model, strategy
        with strategy.scope():
            self.loss = keras.metrics.Mean()
            self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.step = tf.function(
            lambda iterator: strategy.run(self._replica, (next(iterator),)),
            autograph=False,
        )

    def _replica(self, batch: tuple[tf.Tensor, tf.Tensor]) -> None:
        x, y = batch
        model, count = self.model, self.strategy.num_replicas_in_sync
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = keras.ops.mean(
                keras.losses.sparse_categorical_crossentropy(y, logits, True)
            )
            scaled = loss / count
        weights = model.trainable_weights
        model.optimizer.apply(
            tape.gradient(scaled, [w.value for w in weights]), weights
        )
        self.loss.update_state(loss, sample_weight=tf.shape(y)[0])
        self.accuracy.update_state(y, logits)

    def run(
        self,
        data: tf.distribute.DistributedDataset,
        steps: int,
        clock: Clock,
    ) -> None:
        """Train on all batches, and read the metrics."""
        iterator = iter(data)
        for i in range(steps):
            self.step(iterator)
            clock.on_train_batch_end(i)
        for metric in (self.loss, self.accuracy):
            float(metric.result())
            metric.reset_state()


def make_data(image: tuple[int, ...], steps: int) -> tf.data.Dataset:
    """Return batches in memory; with images, repeat one large batch."""
    rng = np.random.default_rng(0)
    rows = BATCH if image else BATCH * steps
    x = rng.standard_normal((rows, *(image or (WIDTH,))), "float32")
    y = rng.integers(0, CLASSES, rows)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.batch(BATCH).cache().repeat(BATCH * steps // rows)


def work(rounds: int, steps: int, path: pathlib.Path) -> None:
    """Train as one worker; the first worker writes the times."""
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    models = {}
    for name, (image, optimizer) in TASKS.items():
        data = make_data(image, steps)
        with strategy.scope():
            model = make_model(WIDTH, optimizer(), image)
        clocks = compare(strategy, model, data, rounds, steps)
        models[name] = {
            "step_ms": {name: clock.times for name, clock in clocks.items()}
        }
    if strategy.cluster_resolver.task_id == 0:
        path.write_text(json.dumps(models))


def compare(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    data: tf.data.Dataset,
    rounds: int,
    steps: int,
) -> dict[str, Clock]:
    """Let contenders take turns; return their clocks."""
    loop = CustomLoop(model, strategy)
    distributed = strategy.experimental_distribute_dataset(data)

    def fit(clock: Clock, compares_data: bool = True) -> None:
        strategy.compares_data = compares_data
        model.fit(data, shuffle=False, verbose=0, callbacks=[clock])

    contenders = {
        "fit": fit,
        "fit, data not compared": lambda clock: fit(clock, False),
        "custom loop": lambda clock: loop.run(distributed, steps, clock),
    }
    clocks = {name: Clock() for name in contenders}
    for i in range(rounds + 1):
        for name, train in contenders.items():
            # The first round traces, so its times are not kept.
            train(clocks[name] if i else Clock())
    return clocks


def main() -> None:
    parser = results.options(__file__, __doc__, workers=2, rounds=5, steps=100)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.rounds, arguments.steps, arguments.output)
        return
    own = ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
    models = launched.run(__file__, arguments.workers, "--work", *own)
    for name, result in models.items():
        result["workers"] = arguments.workers
        results.record(arguments.output, name, result, tables.fit)


if __name__ == "__main__":
    main()
