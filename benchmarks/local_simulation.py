"""Simulates workers that take local steps of AdamW or Muon, in one process.

Up to rounding, the simulation computes the same weights as several workers with
`tfo.SparseLoCo(make_inner(...), sync_every=...)`, in a fraction of the time:
the steps of a round are one graph, which is compiled only once for each
`sync_every`. A test compares the two.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers.codes.layout import Layout
from tf_optimizers.codes.values import CODES
from tf_optimizers.compression.sparsity_schedule import (
    SparsitySchedule,
    sent_count,
)
from tf_optimizers.demo.trainer import WarmupThenDecay

WEIGHT_DECAY = 0.01
# The defaults of Keras.
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7
MOMENTUM, ITERATIONS, SCALE = 0.95, 5, 0.2
A, B, C = 3.4445, -4.7750, 2.0315
ADAMW, MUON = "AdamW", "Muon"

Tensors = list[tf.Tensor]


def make_inner(
    name: str, rate: Any, model: keras.Model
) -> keras.optimizers.Optimizer:
    """Return AdamW, or Muon, which steps only hidden weight matrices."""
    if name == ADAMW:
        return keras.optimizers.AdamW(rate, weight_decay=WEIGHT_DECAY)
    return keras.optimizers.Muon(
        rate,
        weight_decay=WEIGHT_DECAY,
        adam_weight_decay=WEIGHT_DECAY,
        exclude_layers=["positions", model.layers[-1].name],
    )


class Simulation:
    """Trains a network on several workers, which share each batch.

    Args:
        model: The network, which returns logits. It gets the trained weights
            at the end of `train`.
        workers: int >= 1.
        inner: `ADAMW` or `MUON`.
    """

    def __init__(
        self, model: keras.Model, workers: int, inner: str = ADAMW
    ) -> None:
        self.model, self.workers = model, workers
        self._by_muon = [False] * len(model.trainable_variables)
        if inner == MUON:
            optimizer = make_inner(MUON, 0.0, model)
            optimizer.build(model.trainable_variables)
            # Muon has no second moments of the variables that it steps itself.
            self._by_muon = [v is None for v in optimizer.adam_velocities]
        self._schedule = WarmupThenDecay()
        self._local_steps = tf.function(
            self._take_local_steps, autograph=False, jit_compile=True
        )
        self._logits = tf.function(model, autograph=False)

    def train(
        self,
        weights: Sequence[np.ndarray],
        batches: Sequence[tuple[np.ndarray, np.ndarray]],
        rate: float,
        average_moments: bool = False,
        **settings: Any,
    ) -> None:
        """Train for a whole run, whose length is a multiple of `sync_every`.

        Args:
            weights: Initial weights.
            batches: The batches of all steps.
            rate: Peak of the learning rate, as in `WarmupThenDecay`.
            average_moments: Whether to average the state of all workers at the
                end of every round. `tfo.SparseLoCo` cannot do this.
            **settings: Arguments of `tfo.SparseLoCo`.
        """
        every = settings.get("sync_every", 1)
        exchange = Exchange(self.workers, settings)
        self._schedule.set(rate, len(batches))
        rates = self._schedule(tf.range(len(batches))).numpy()
        start = [np.array(weight) for weight in weights]
        zeros = [tf.zeros([self.workers, *weight.shape]) for weight in weights]
        state = zeros, zeros
        begun = [np.stack([weight] * self.workers) for weight in start]
        for first in range(0, len(batches), every):
            x, y = map(
                np.stack, zip(*batches[first : first + every], strict=True)
            )
            own, *state = self._local_steps(
                [tf.stack([weight] * self.workers) for weight in start],
                list(map(tf.constant, begun)),
                *state,
                tf.constant(first, tf.int64),
                tf.constant(rates[first : first + every]),
                *(tf.constant(x), tf.constant(y)),
            )
            if average_moments:
                state = [list(map(averaged, each)) for each in state]
            start, begun = exchange(start, begun, own, first + every - 1)
        self.model.set_weights(start)

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
        """Return loss (bits) and accuracy, per label."""
        bits = correct = 0.0
        for i in range(0, len(x), 128):
            logits, labels = self._logits(x[i : i + 128]), y[i : i + 128]
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, logits
            )
            bits += float(tf.reduce_sum(loss)) / np.log(2)
            correct += np.sum(np.argmax(logits, -1) == labels)
        return {
            "bits": float(bits / y.size),
            "accuracy": float(correct / y.size),
        }

    def _take_local_steps(
        self,
        common: Tensors,
        weights: Tensors,
        means: Tensors,
        squares: Tensors,
        first: tf.Tensor,
        rates: tf.Tensor,
        x: tf.Tensor,
        y: tf.Tensor,
    ) -> tuple[Tensors, Tensors, Tensors]:
        """Take the steps of a round; return weights and state of all workers.

        The first axis of weights and state is the worker.

        Args:
            common: The common weights, repeated for each worker. The first
                gradients are taken at these weights.
            weights: Weights of all workers.
            means: AdamW's means of gradients, or Muon's momentum.
            squares: AdamW's means of squared gradients.
            first: The number of steps before this round.
            rates: Learning rate of each step.
            x: A batch for each step.
            y: The labels of each batch.
        """

        def step(
            i: tf.Tensor, weights: Tensors, means: Tensors, squares: Tensors
        ) -> tuple:
            seen = [
                tf.where(i == 0, one, other)
                for one, other in zip(common, weights, strict=True)
            ]
            gradients = self._gradients(seen, x[i], y[i])
            t = tf.cast(first + tf.cast(i, tf.int64) + 1, tf.float32)
            rate = rates[i]
            alpha = rate * tf.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
            moved = []
            state = zip(
                *(self._by_muon, weights, means, squares, gradients),
                strict=True,
            )
            for by_muon, w, m, v, g in state:
                if by_muon:
                    m = m * MOMENTUM + g
                    update = rate * orthogonal(g + MOMENTUM * m)
                else:
                    m += (g - m) * (1 - BETA_1)
                    v += (g * g - v) * (1 - BETA_2)
                    update = m * alpha / (tf.sqrt(v) + EPSILON)
                moved.append((w - w * WEIGHT_DECAY * rate - update, m, v))
            weights, means, squares = map(list, zip(*moved, strict=True))
            return i + 1, weights, means, squares

        _, *state = tf.while_loop(
            lambda i, *_: i < tf.shape(rates)[0],
            step,
            (tf.constant(0), weights, means, squares),
        )
        return tuple(state)

    def _gradients(
        self, weights: Tensors, x: tf.Tensor, y: tf.Tensor
    ) -> Tensors:
        share = x.shape[0] // self.workers
        found = []
        for worker in range(self.workers):
            rows = slice(worker * share, (worker + 1) * share)
            own = [weight[worker] for weight in weights]
            with tf.GradientTape() as tape:
                tape.watch(own)
                logits, _ = self.model.stateless_call(
                    own, self.model.non_trainable_variables, x[rows]
                )
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(
                        y[rows], logits
                    )
                )
            found.append(tape.gradient(loss, own, unconnected_gradients="zero"))
        return [tf.stack(each) for each in zip(*found, strict=True)]


def averaged(values: tf.Tensor) -> tf.Tensor:
    """Return the mean over workers, the first axis, for every worker."""
    mean = tf.reduce_mean(values, axis=0, keepdims=True)
    return tf.repeat(mean, values.shape[0], axis=0)


def orthogonal(matrices: tf.Tensor) -> tf.Tensor:
    """Return Keras's approximation of the nearest orthogonal matrices, scaled.

    The argument's shape is [workers, rows, columns].
    """
    rows, columns = matrices.shape[1:]
    if rows > columns:
        transposed = orthogonal(tf.linalg.matrix_transpose(matrices))
        return tf.linalg.matrix_transpose(transposed)
    x = matrices / (tf.norm(matrices, axis=(1, 2), keepdims=True) + 1e-7)
    for _ in range(ITERATIONS):
        product = tf.matmul(x, x, transpose_b=True)
        x = A * x + (B * product + C * product @ product) @ x
    return x * SCALE * columns**0.5


class Exchange:
    """Exchanges pseudo-gradients as `tfo.SparseLoCo` does, in one process.

    Args:
        workers: int >= 1.
        settings: Arguments of `tfo.SparseLoCo`.
    """

    def __init__(self, workers: int, settings: dict[str, Any]) -> None:
        names = ("rampup_begin_step", "rampup_step", "rampdown_begin_step")
        names += ("rampdown_step", "sync_every")
        self._schedule = SparsitySchedule(
            settings.get("sparsity", (0.0,)),
            **{name: settings[name] for name in names if name in settings},
        )
        self._code = CODES[settings.get("value_dtype", "float32")]
        self._rate = settings.get("outer_learning_rate", 1.0)
        self._decay = settings.get("residual_decay", 1.0)
        self._ahead = np.float32(workers * settings.get("step_ahead", 0.0))
        self._workers = workers
        # Use a graph, since rounding takes many small operations.
        self._round = tf.function(self._rounded, autograph=False)
        self._residuals: list[np.ndarray] = []

    def __call__(
        self,
        start: list[np.ndarray],
        begun: list[np.ndarray],
        own: Tensors,
        step: int,
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the common weights after a round, and all workers' weights.

        With `step_ahead`, workers begin the next round at their own weights.

        Args:
            start: The common weights before the round.
            begun: The weights of all workers before their local steps.
            own: The weights of all workers after their local steps.
            step: The number of the step that exchanges.
        """
        sparsity = self._schedule.stages[self._schedule.stage(step)]
        moved = [
            ((before - after.numpy()) / self._workers).reshape(
                self._workers, -1
            )
            for before, after in zip(begun, own, strict=True)
        ]
        if not self._residuals:
            self._residuals = [np.zeros_like(each) for each in moved]
        totals = []
        for residual, each in zip(self._residuals, moved, strict=True):
            residual *= np.float32(self._decay)
            residual += each
        if sparsity:
            totals = self._send(sparsity)
        else:
            totals = [residual.sum(0) for residual in self._residuals]
            for residual in self._residuals:
                residual[:] = 0
        common = [
            before - np.float32(self._rate) * total.reshape(before.shape)
            for before, total in zip(start, totals, strict=True)
        ]
        return common, [
            weight - self._ahead * residual.reshape(-1, *weight.shape)
            for weight, residual in zip(common, self._residuals, strict=True)
        ]

    def _send(self, sparsity: float) -> list[np.ndarray]:
        """Return the sum of the largest entries; subtract the sent values."""
        positions, values = [], []
        for residual in self._residuals:
            count = sent_count(residual.shape[1], sparsity)
            largest = np.argpartition(-np.abs(residual), count - 1)[:, :count]
            positions.append(np.sort(largest, 1))
            values.append(np.take_along_axis(residual, positions[-1], 1))
        rounded = self._round(
            list(map(tf.constant, values)), list(map(tf.constant, positions))
        )
        totals = []
        for residual, at, sent in zip(
            self._residuals, positions, rounded, strict=True
        ):
            sent = tf.cast(sent, tf.float32).numpy()
            total = np.zeros(residual.shape[1], "float32")
            for worker in range(self._workers):
                total[at[worker]] += sent[worker]
                residual[worker, at[worker]] -= sent[worker]
            totals.append(total)
        return totals

    def _rounded(self, values: Tensors, positions: Tensors) -> Tensors:
        return self._code.round(values, Layout(positions))
