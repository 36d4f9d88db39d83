"""Three learning tasks on data that need no download, and their training.

digits: scikit-learn's 1,797 images of handwritten digits, by a convolutional
    net or, in short runs, by the demo's dense net.
text: the English of Python's own manual (`pydoc_data.topics`), by a transformer
    that predicts the next character.
code: the Python sources of the standard library, by the same transformer.
"""

import os
import pathlib
import pydoc_data.topics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_optimizers as tfo
from tf_optimizers.demo.data import MAX_PIXEL, split_rows
from tf_optimizers.demo.gradient_compression.compression_study import (
    FULL as DEMO,
)
from tf_optimizers.demo.network import build_model
from tf_optimizers.demo.trainer import Trainer

Split = tuple[np.ndarray, np.ndarray]

CONTEXT = 32
CODE_STEPS = 10_000
WIDTH, BLOCKS = 128, 1


@dataclass(frozen=True)
class Task:
    """A data set, a network, and the length of a run."""

    load: Callable[[], dict[str, Split]]
    make_model: Callable[[], keras.Model]
    batch_size: int
    epochs: int

    @cached_property
    def data(self) -> dict[str, Split]:
        return self.load()

    @property
    def steps_per_epoch(self) -> int:
        return len(self.data["train"][0]) // self.batch_size

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def batches(self, seed: int) -> Iterator[Split]:
        """Return all batches of a run, in the order of a seed."""
        rng = np.random.default_rng(seed)
        x, y = self.data["train"]
        for _ in range(self.epochs):
            order = rng.permutation(len(x))
            for step in range(self.steps_per_epoch):
                first = step * self.batch_size
                rows = order[first : first + self.batch_size]
                yield x[rows], y[rows]


def load_images() -> dict[str, Split]:
    digits = load_digits()
    images = (digits.images / MAX_PIXEL).astype("float32")[..., np.newaxis]
    labels = digits.target.astype("int32")
    rows = split_rows(digits.target)
    return {name: (images[row], labels[row]) for name, row in rows.items()}


def make_convolutional() -> keras.Model:
    """Return a network of 0.55 M parameters."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def make_dense() -> keras.Model:
    """Return the demo's network of 2.2 M parameters, with random weights."""
    return build_model(np.random.randint(1 << 16), DEMO.hidden_units)


@cache
def manual() -> str:
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


@cache
def sources() -> str:
    """Return enough of the standard library for an epoch of "code"."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    text = "".join(
        path.read_bytes().decode("ascii", "ignore") for path in files
    )
    return text[: CODE_STEPS * 8 * CONTEXT * 10 // 9 + CONTEXT]


@cache
def characters(read: Callable[[], str]) -> str:
    """Return the distinct characters of a text, sorted."""
    return "".join(sorted(set(read())))


def load_text(read: Callable[[], str] = manual) -> dict[str, Split]:
    """Return windows of a text, and the next characters: [windows, CONTEXT]."""
    codes = {character: i for i, character in enumerate(characters(read))}
    text = np.array([codes[character] for character in read()], "int32")
    windows = (len(text) - 1) // CONTEXT
    x, y = (
        text[shift : shift + windows * CONTEXT].reshape(windows, CONTEXT)
        for shift in (0, 1)
    )
    ends = (int(0.9 * windows), int(0.95 * windows))
    names = ("train", "validation", "test")
    return dict(
        zip(
            names,
            zip(np.split(x, ends), np.split(y, ends), strict=True),
            strict=True,
        )
    )


def make_transformer(
    read: Callable[[], str] = manual, width: int = WIDTH
) -> keras.Model:
    """Return a pre-normalized network, of 0.23 M parameters by default."""
    symbols = len(characters(read))
    layers = keras.layers
    tokens = keras.Input((CONTEXT,), dtype="int32")
    hidden = layers.Embedding(symbols, width)(tokens)
    hidden = Positions()(hidden)
    for _ in range(BLOCKS):
        normal = layers.LayerNormalization()(hidden)
        hidden += layers.MultiHeadAttention(4, width // 4)(
            normal, normal, use_causal_mask=True
        )
        inner = layers.LayerNormalization()(hidden)
        inner = layers.Dense(4 * width, activation="gelu")(inner)
        hidden += layers.Dense(width)(inner)
    hidden = layers.LayerNormalization()(hidden)
    return keras.Model(tokens, layers.Dense(symbols)(hidden))


class Positions(keras.layers.Layer):
    """Adds a learned vector for each position."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.vectors = self.add_weight(
            shape=shape[1:], initializer="random_normal", name="vectors"
        )

    def call(self, hidden: tf.Tensor) -> tf.Tensor:
        return hidden + self.vectors


TASKS = {
    "digits": Task(load_images, make_convolutional, 64, 40),
    **{
        f"digits in {steps} steps": Task(
            load_images, make_dense, 128, steps // 8
        )
        for steps in (96, 128, 256)
    },
    "text": Task(load_text, make_transformer, 8, 2),
    "code": Task(
        partial(load_text, sources), partial(make_transformer, sources), 8, 1
    ),
}


class TaskTrainer(Trainer):
    """Trains the network of a task in a custom loop.

    Args:
        task: The task.
        strategy: The strategy; each replica is a worker.
        make_optimizer: Takes a schedule and the number of steps of a run.
    """

    def __init__(
        self,
        task: Task,
        strategy: tf.distribute.Strategy,
        make_optimizer: Callable,
    ) -> None:
        with strategy.scope():
            super().__init__(
                task.make_model(), lambda rate: make_optimizer(rate, task.steps)
            )
        self.task = task
        self.train_step = self._make_step(strategy)
        self._scores = tf.function(self._score, autograph=False)

    def evaluate(self, split: str) -> dict[str, float]:
        """Return loss (bits) and accuracy, per image or character."""
        if isinstance(self.optimizer, tfo.SparseLoCo):
            self.optimizer.synchronize()
        x, y = self.task.data[split]
        sums = np.sum(
            [
                [
                    part.numpy()
                    for part in self._scores(x[i : i + 128], y[i : i + 128])
                ]
                for i in range(0, len(x), 128)
            ],
            axis=0,
        )
        bits, correct = sums / y.size
        return {"bits": float(bits), "accuracy": float(correct)}

    def _score(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        logits = self.model(x)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        hits = tf.argmax(logits, -1, tf.int32) == y
        return (
            tf.reduce_sum(loss) / np.log(2),
            tf.reduce_sum(tf.cast(hits, tf.float32)),
        )

    def _make_step(self, strategy: tf.distribute.Strategy) -> Callable:
        replicas = strategy.num_replicas_in_sync
        share = self.task.batch_size // replicas
        variables = self.model.trainable_variables

        def replica(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            first = context.replica_id_in_sync_group * share
            x, y = x[first : first + share], y[first : first + share]
            with tf.GradientTape() as tape:
                logits = self.model(x, training=True)
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
                )
                scaled = loss / replicas
            gradients = tape.gradient(scaled, [v.value for v in variables])
            self.optimizer.apply(gradients, variables)
            return loss

        return tf.function(
            lambda x, y: strategy.run(replica, (x, y)), autograph=False
        )
