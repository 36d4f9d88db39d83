"""`ShardedState` on several workers, or devices.

`sharded.py compare NAME...` compares it with its inner optimizer; `devices`
does so under `MirroredStrategy`;
`sharded.py resume BACKUPS EPOCHS [STEPS]` continues from a backup, if there is
one, and kills itself after STEPS steps.
"""

import functools
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf
from quick_graphs import leave_data_untuned
from real_workers import report
from tensorflow.python.eager import context

import tf_optimizers as tfo
from tf_optimizers.workers import worker_replicas

# Split even the variables of these small models, and send several messages.
worker_replicas.LARGEST_MESSAGE = 256

X = np.random.default_rng(0).random((16, 6)).astype("float32")
Y = X[:, :3]
EVERY = {
    name: getattr(keras.optimizers, name)
    for name in (
        *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax"),
        *("Adafactor", "Nadam", "Ftrl", "Lion", "Lamb", "Muon"),
        "ScheduleFreeAdamW",
    )
    if hasattr(keras.optimizers, name)
} | {
    "tfo.Lamb": tfo.Lamb,
    "tfo.LANS": tfo.LANS,
    "tfo.AdamOffload": tfo.AdamOffload,
}
MAKE = {name: functools.partial(make, 0.01) for name, make in EVERY.items()} | {
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(0.01, 20)
    ),
    "scaled loss": lambda: keras.optimizers.Adam(0.01, loss_scale_factor=8.0),
    "not decayed": lambda: without_biases(
        keras.optimizers.AdamW(0.01, weight_decay=0.5)
    ),
    "mixed_float16": lambda: keras.optimizers.Adam(0.01),
    "frozen": lambda: keras.optimizers.Adam(0.01),
    "words": lambda: keras.optimizers.Adam(0.01),
    "counted": lambda: Counted(0.01),
    "counted in parts": lambda: in_parts(Counted(0.01)),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "ema": lambda: keras.optimizers.AdamW(
        0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "accumulated": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=3
    ),
    "offload": lambda: tfo.AdamOffload(0.01, use_ema=True, ema_momentum=0.5),
    "clipped": lambda: tfo.AdamOffload(0.01, clipnorm=0.05),
    "clipped together": lambda: tfo.AdamOffload(0.01, global_clipnorm=0.05),
}


class Counted(keras.optimizers.Optimizer):
    """Counts the steps of each variable; its rate depends on the count."""

    kind = "int32"

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.means = self.add_optimizer_variables(list(variables), "mean")
        self.counts = self.add_counts(variables)

    def add_counts(self, variables):
        return [
            self.add_variable((), dtype=self.kind, name=f"count_{i}")
            for i, _ in enumerate(variables)
        ]

    def count(self, place):
        self.assign_add(self.counts[place], 1)

    def update_step(self, gradient, variable, learning_rate):
        place = self._get_variable_index(variable)
        self.count(place)
        self.assign(self.means[place], 0.9 * self.means[place] + gradient)
        rate = learning_rate / keras.ops.sqrt(
            1 + keras.ops.cast(self.counts[place], "float32")
        )
        self.assign_sub(variable, rate * self.means[place])


def in_parts(optimizer):
    optimizer.is_elementwise = True
    return optimizer


def without_biases(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def first_layers(name):
    """Return a model's first layers; for "words", with an embedding."""
    first = keras.layers.Dense(8, "tanh", trainable=name != "frozen")
    if name != "words":
        return [first]
    return [keras.layers.Embedding(2, 4), keras.layers.Flatten(), first]


def trained(strategy, name, wrap):
    keras.utils.set_random_seed(0)
    is_mixed = name.startswith("mixed")
    keras.config.set_dtype_policy(name if is_mixed else "float32")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                *first_layers(name),
                keras.layers.Dense(3),
            ]
        )
        # Under `mixed_float16`, Keras adds a `LossScaleOptimizer`.
        model.compile(wrap(MAKE[name]()), "mse")
    # The last batch has a different size on each worker.
    model.fit(X[:15], Y[:15], batch_size=8, epochs=5, verbose=0)
    return model


class Kill(keras.callbacks.Callback):
    """Kills this worker after `steps` steps, before the last is backed up."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        self.steps -= 1
        if not self.steps:
            os.kill(os.getpid(), signal.SIGKILL)


def resumed(strategy, folder, epochs, steps=0):
    """Train with a backup, or resume; return weights and optimizer state."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3)]
        )
        model.compile(tfo.ShardedState(keras.optimizers.Nadam(0.01)), "mse")
    backup = tfo.callbacks.BackupAndRestore(
        folder, save_freq=1, delete_checkpoint=False
    )
    model.fit(
        *(X, Y),
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[Kill(steps), backup] if steps else [backup],
    )
    found = [*model.weights, *model.optimizer.variables]
    return [variable.numpy().tolist() for variable in found]


def main():
    """Report weights; or variables that differ, and the bytes per replica."""
    mode, *arguments = sys.argv[1:]
    leave_data_untuned()
    strategy = (
        tf.distribute.MirroredStrategy()
        if mode == "devices"
        else tfo.SparseMultiWorkerMirroredStrategy()
    )
    if mode == "resume":
        folder, *numbers = arguments
        report(resumed(strategy, folder, *map(int, numbers)))
        return
    wrong = []
    for name in arguments:
        expected = trained(strategy, name, lambda inner: inner)
        model = trained(strategy, name, tfo.ShardedState)
        mine = [*model.weights, *model.optimizer.variables]
        theirs = [*expected.weights, *expected.optimizer.variables]
        wrong += [
            f"{name}: {one.path}"
            for one, other in zip(mine, theirs, strict=True)
            if not np.allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-6)
            and not one.path.endswith("_gradient_accumulator")
        ]
        sharded = model.optimizer
        if not isinstance(sharded, tfo.ShardedState):  # Scales the loss.
            sharded = sharded.inner_optimizer
        # Whole variables cannot be distributed evenly.
        if sharded.is_elementwise(sharded.inner_optimizer):
            owned = sharded.memory_summary()["owned"]
    result = {"wrong": wrong, "owned": owned}
    if mode == "compare":
        server = context.context()._collective_ops_server_def
        config = server.default_session_config.experimental
        result["string_bytes"] = config.recv_buf_max_chunk
    report(result)


if __name__ == "__main__":
    main()
