"""A network and its optimizer, reset for each run of a study."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

WARMUP_SHARE = 0.1

MakeOptimizer = Callable[["WarmupThenDecay"], keras.optimizers.Optimizer]


class WarmupThenDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up to `peak`, then linear decay towards zero.

    At step t of T, counted from 1, with a warm-up of W = max(1, T / 10) steps:

        rate <- peak min(t / W, (T + 1 - t) / (T + 1 - W))

    The peak and T are variables, so a new run does not trace the step again.
    """

    def __init__(self) -> None:
        """Create the schedule; call `set` before a run."""
        self.peak = keras.Variable(0.0, trainable=False)
        self.steps = keras.Variable(1.0, trainable=False)

    def set(self, peak: float, steps: int) -> None:
        """Set the highest rate and the number of steps of a run."""
        self.peak.assign(peak)
        self.steps.assign(steps)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Return the rate of step t = `step` + 1."""
        t = keras.ops.cast(step, "float32") + 1.0
        warmup = keras.ops.maximum(1.0, WARMUP_SHARE * self.steps)
        decay = (self.steps + 1.0 - t) / (self.steps + 1.0 - warmup)
        return self.peak * keras.ops.minimum(t / warmup, decay)

    def get_config(self) -> dict[str, Any]:
        """Return an empty config: the constructor has no arguments."""
        return {}


class Trainer:
    """Trains one network with one optimizer, in several runs.

    Args:
        model: The network, which returns logits.
        make_optimizer: Takes the schedule, and returns an unbuilt optimizer.
    """

    def __init__(
        self, model: keras.Model, make_optimizer: MakeOptimizer
    ) -> None:
        self.model = model
        self.schedule = WarmupThenDecay()
        self.optimizer = make_optimizer(self.schedule)
        model.compile(
            optimizer=self.optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        self.optimizer.build(model.trainable_variables)
        self._first_state = [v.numpy() for v in self.optimizer.variables]
        self._logits = tf.function(
            lambda images: model(images, training=False), autograph=False
        )

    def reset(
        self, weights: Sequence[np.ndarray], rate: float, steps: int
    ) -> None:
        """Reset weights and optimizer for a run of `steps` steps."""
        # A new `compile` would trace again, which takes as long as hundreds of
        # steps. Resetting variables is enough: a run changes nothing else.
        self.model.set_weights(weights)
        for variable, first in zip(
            self.optimizer.variables, self._first_state, strict=True
        ):
            variable.assign(first)
        self.schedule.set(rate, steps)

    def train(
        self,
        data: tf.data.Dataset,
        weights: Sequence[np.ndarray],
        rate: float,
        steps: int,
        callbacks: Sequence[keras.callbacks.Callback] = (),
    ) -> None:
        """Train for `steps` batches of `data`, starting from `weights`."""
        self.reset(weights, rate, steps)
        # The whole run is one Keras epoch, because starting an epoch takes as
        # long as ten steps of this small network.
        self.model.fit(
            data.take(steps),
            verbose=0,
            shuffle=False,
            callbacks=list(callbacks),
        )

    def count_correct(self, images: np.ndarray, labels: np.ndarray) -> int:
        """Return how many of the images are classified correctly."""
        return int(np.sum(np.argmax(self._logits(images), axis=1) == labels))

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Return the fraction of images that are classified correctly."""
        return self.count_correct(images, labels) / len(labels)
