"""Small trainings that are backed up and interrupted."""

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.callbacks.backup.archive import Archive
from tf_optimizers.callbacks.backup.files import Folder
from tf_optimizers.callbacks.backup.state import State
from tf_optimizers.replicas import replicas_of

X, Y = np.random.default_rng(0).random((2, 60, 8)).astype("float32")
OPTIMIZERS = {
    **{name: case.make for name, case in cases.CASES.items()},
    "dgc": lambda **kwargs: tfo.DGCMomentum(
        0.1, sparsity=(0.9,), min_compress_size=20, **kwargs
    ),
    "loco": lambda **kwargs: tfo.SparseLoCo(
        keras.optimizers.Adam(0.01),
        sparsity=(0.9,),
        min_compress_size=20,
        **kwargs,
    ),
    # Neither epochs nor backups end together with rounds.
    "rounds": lambda **kwargs: tfo.SparseLoCo(
        keras.optimizers.Adam(0.01),
        sync_every=4,
        sparsity=(0.9,),
        min_compress_size=20,
        **kwargs,
    ),
    "rounds ahead": lambda **kwargs: tfo.SparseLoCo(
        keras.optimizers.Adam(0.01),
        sync_every=4,
        sparsity=(0.9,),
        min_compress_size=20,
        step_ahead=0.5,
        **kwargs,
    ),
    "keras-adam": keras.optimizers.Adam,
}
WRAPPERS = {
    "alone": lambda optimizer: optimizer,
    "in LossScaleOptimizer": keras.optimizers.LossScaleOptimizer,
    "in MultiOptimizer": lambda optimizer: keras.optimizers.MultiOptimizer(
        lambda variable: optimizer
    ),
}
NONE = tf.distribute.get_strategy()


class Interruption(Exception):
    """Stands for the kill of a process."""


class Interrupt(keras.callbacks.Callback):
    """Raises an error in a given step; steps are counted over all epochs."""

    def __init__(self, step):
        super().__init__()
        self.remaining = step

    def on_train_batch_begin(self, batch, logs=None):
        self.remaining -= 1
        if self.remaining < 0:
            raise Interruption


class Logs(keras.callbacks.Callback):
    """Records the logs of each epoch."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append((epoch, logs))


def make_model(optimizer, strategy=NONE, width=16, **kwargs):
    """Return a model whose state includes seeds and statistics per replica."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(width, activation="relu"),
                keras.layers.Dropout(0.5),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(8),
            ]
        )
        model.compile(optimizer(), "mse", metrics=["mae"], **kwargs)
    return model


def fit(model, folder, *callbacks, epochs=3, **kwargs):
    """Train on six batches per epoch; return the logs of epochs."""
    noted = Logs()
    backup = tfo.callbacks.BackupAndRestore(folder, **kwargs)
    model.fit(
        *(X, Y),
        batch_size=10,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[backup, noted, *callbacks],
    )
    return noted.logs


def epochs_of(logs):
    return [epoch for epoch, _ in logs]


def parts(model):
    """Return all replicas' copies of a model's and optimizer's variables."""
    strategy = model.distribute_strategy
    return [
        part
        for v in [*model.variables, *model.optimizer.variables]
        for part in strategy.experimental_local_results(v.value)
    ]


def state(model):
    """Return the values of every replica's variables."""
    return [cases.as_numpy(part) for part in parts(model)]


def reset(model, values):
    """Restore values from `state`, since a new model would be traced again."""
    keras.utils.set_random_seed(1)
    for part, value in zip(parts(model), values, strict=True):
        part.assign(value)


def interrupt(model, folder, step, **kwargs):
    with pytest.raises(Interruption):
        fit(model, folder, Interrupt(step), **kwargs)


def make_archive(
    folder,
    strategy=NONE,
    optimizer="dgc",
    width=16,
    wrapper="alone",
    run="",
    **kwargs,
):
    """Return the archive of a model that has not been trained."""

    def make():
        return WRAPPERS[wrapper](OPTIMIZERS[optimizer](**kwargs))

    model = make_model(make, strategy, width)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    folder = Folder(folder, run)
    return Archive(folder, State(model), replicas_of(strategy), 2), model


def scramble(model, seed):
    """Give each replica different values, in variables that may differ."""
    rng = np.random.default_rng(seed)
    strategy = model.distribute_strategy
    for v in [*model.variables, *model.optimizer.variables]:
        parts = strategy.experimental_local_results(v.value)
        values = [rng.standard_normal(v.shape) * 10 for _ in parts]
        for part, value in zip(parts, values, strict=True):
            own = "on_read" in str(v.synchronization) or "moving" in v.path
            part.assign(tf.cast(value if own else values[0], v.dtype))


def restore(archive):
    content = archive.newest()
    archive.restore(content, "lasting")
    return content


def make_small(folder, step=4, save_freq=4, **kwargs):
    """Return a model that was backed up within an epoch of six batches."""

    def make():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    interrupt(make(), folder, step, save_freq=save_freq, **kwargs)
    return make()


def fit_alone(model):
    """Return the number of steps, of six, that `fit` makes without a backup."""
    before = int(model.optimizer.iterations.numpy())
    model.fit(X, Y, batch_size=10, verbose=0)
    return int(model.optimizer.iterations.numpy()) - before
