"""One compiled model per optimizer, reset for each run of the study."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import keras
import numpy as np
import tensorflow as tf

HIDDEN_UNITS = (128, 128)
WARMUP_SHARE = 0.1

MakeOptimizer = Callable[["WarmupThenDecay"], keras.optimizers.Optimizer]


class WarmupThenDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up to `peak`, then linear decay towards zero.

    At step t of T, counted from 1, with a warm-up of W = max(1, T / 10) steps:

        rate <- peak min(t / W, (T + 1 - t) / (T + 1 - W))

    Both numbers are variables: a new peak or length needs no new trace.
    """

    def __init__(self) -> None:
        """Create the schedule; `set` fills it in."""
        self.peak = keras.Variable(0.0, trainable=False)
        self.steps = keras.Variable(1.0, trainable=False)

    def set(self, peak: float, steps: int) -> None:
        """Choose the highest rate and the number of steps of a run."""
        self.peak.assign(peak)
        self.steps.assign(steps)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Return the rate of the step after `step` finished ones."""
        t = keras.ops.cast(step, "float32") + 1.0
        warmup = keras.ops.maximum(1.0, WARMUP_SHARE * self.steps)
        decay = (self.steps + 1.0 - t) / (self.steps + 1.0 - warmup)
        return self.peak * keras.ops.minimum(t / warmup, decay)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments; there are none."""
        return {}


class Trainer:
    """Trains one network with one optimizer, run after run.

    Args:
        make_optimizer: Takes the schedule, returns an unbuilt optimizer.
        hidden_units: Widths of the network's hidden layers.
    """

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        hidden_units: Sequence[int] = HIDDEN_UNITS,
    ) -> None:
        """Compile the model and remember the optimizer's first state."""
        self.hidden_units = tuple(hidden_units)
        self.schedule = WarmupThenDecay()
        self.model = build_model(0, self.hidden_units)
        self.optimizer = make_optimizer(self.schedule)
        self.model.compile(
            optimizer=self.optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        self.optimizer.build(self.model.trainable_variables)
        self._first_state = [v.numpy() for v in self.optimizer.variables]

    def train(
        self,
        data: tf.data.Dataset,
        rate: float,
        steps: int,
        seed: int,
        callbacks: Sequence[keras.callbacks.Callback] = (),
    ) -> None:
        """Train for `steps` batches of `data`, from the weights of `seed`."""
        self.reset(rate, steps, seed)
        # One Keras epoch for the whole run: each further one costs more than
        # ten steps of this small network.
        self.model.fit(
            data.take(steps),
            verbose=0,
            shuffle=False,
            callbacks=list(callbacks),
        )

    def accuracy(self, images: tf.Tensor, labels: tf.Tensor) -> float:
        """Return the share of images classified correctly."""
        logits = self.model.predict_on_batch(images)
        return float(np.mean(np.argmax(logits, axis=1) == labels.numpy()))

    def reset(self, rate: float, steps: int, seed: int) -> None:
        """Become what a new trainer is, for a run of `steps` steps."""
        # Tracing a train step takes as long as hundreds of steps, and a model
        # compiled anew traces anew. Its variables are all that a run leaves
        # behind, so those are set back instead.
        self.model.set_weights(initial_weights(seed, self.hidden_units))
        for variable, first in zip(
            self.optimizer.variables, self._first_state, strict=True
        ):
            variable.assign(first)
        self.schedule.set(rate, steps)


class StepRecorder(keras.callbacks.Callback):
    """Records the training loss and a held-out accuracy at every step."""

    def __init__(self, measure: Callable[[], float]) -> None:
        """Record `measure()` beside the loss of each batch."""
        super().__init__()
        self.measure = measure
        self.loss: list[float] = []
        self.accuracy: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Forget earlier batches, which Keras would average in."""
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Note this step's loss, and the accuracy after it."""
        self.loss.append(float(logs["loss"]))
        self.accuracy.append(self.measure())


def build_model(seed: int, hidden_units: tuple[int, ...]) -> keras.Model:
    """Return the network with the initial weights of `seed`."""
    widths = (*hidden_units, 10)
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    for layer, width in enumerate(widths):
        model.add(
            keras.layers.Dense(
                width,
                activation="relu" if layer < len(hidden_units) else None,
                kernel_initializer=keras.initializers.HeNormal(
                    seed=seed * len(widths) + layer
                ),
            )
        )
    return model


@lru_cache
def initial_weights(
    seed: int, hidden_units: tuple[int, ...]
) -> list[np.ndarray]:
    """Return what every optimizer starts from under `seed`."""
    return build_model(seed, hidden_units).get_weights()


def shuffled_batches(
    data: tf.data.Dataset, batch_size: int, seed: int
) -> tf.data.Dataset:
    """Return endless batches in an order that only `seed` decides."""
    # tf.data's autotuning thread, asleep for longer and longer spells, holds up
    # the end of a run by as much as the run itself takes.
    options = tf.data.Options()
    options.autotune.enabled = False
    return (
        data.shuffle(data.cardinality(), seed=seed)
        .repeat()
        .batch(batch_size)
        .prefetch(2)
        .with_options(options)
    )
