"""Trainings that are backed up.

resume.py equal STEP...   one optimizer after another, each killed by its
                          own worker at its own step, but for a step of -1
resume.py elastic FOLDER:EPOCHS...   DGCMomentum, restored if it can be
"""

import hashlib
import os
import pathlib
import signal
import sys

import keras
import numpy as np
import tensorflow as tf
from programs.training import OPTIMIZERS
from workers import report

import tf_optimizers as tfo

NAMES = ["dgc", "adam_offload", "lamb", "lans"]
X, Y = np.random.default_rng(0).random((2, 48, 40)).astype("float32")
SAVE_EVERY = 4


class Kill(keras.callbacks.Callback):
    """Kills this process in a step, counted over all epochs."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == self.step + 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Note(keras.callbacks.Callback):
    """Notes what there is when the training starts."""

    def on_train_begin(self, logs=None):
        self.start = int(self.model.optimizer.iterations.numpy())
        self.memory = memory(self.model)


def make_model(strategy, name):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((40,)),
                keras.layers.Dense(60, activation="relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(40),
            ]
        )
        model.compile(OPTIMIZERS[name](), "mse")
    return model


def saves(place):
    """Return the folder of what Keras and TensorFlow save by themselves."""
    return pathlib.Path(os.environ["FOLDER"]) / f"saves-{place}"


def fit(model, folder, *callbacks, epochs=3, **kwargs):
    """Twelve batches an epoch."""
    backup = tfo.callbacks.BackupAndRestore(
        pathlib.Path(os.environ["FOLDER"]) / folder,
        delete_checkpoint=False,
        **kwargs,
    )
    model.fit(
        *(X, Y),
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[backup, *callbacks],
    )


def memory(model):
    """This worker's own u and v: added up, by replica, and if all alike."""
    local = model.distribute_strategy.experimental_local_results
    parts = [
        [part.numpy() for part in local(v.value)]
        for v in model.optimizer.variables
        if v.aggregation == "sum"
    ]
    return {
        "sums": [np.sum(p, 0, dtype="float64").tolist() for p in parts],
        "own": hashlib.sha256(
            b"".join(part.tobytes() for each in parts for part in each)
        ).hexdigest(),
        "alike": all(
            (part == each[0]).all() for each in parts for part in each
        ),
    }


def equal(strategy, steps):
    """Return what has become of each optimizer's training."""
    restart = int(os.environ.get("TF_OPTIMIZERS_RESTART", 0))
    result = {}
    for i, (name, step) in enumerate(zip(NAMES, steps, strict=True)):
        is_victim = (restart, i % 2) == (i, strategy.extended.worker_index)
        note = Note()
        model = make_model(strategy, name)
        fit(
            *(model, name, note, Kill(step if is_victim else -1)),
            save_freq=SAVE_EVERY,
        )
        result[name] = {
            "start": note.start,
            "steps": int(model.optimizer.iterations.numpy()),
            "memory": memory(model)["own"],
            "weights": [w.tolist() for w in model.get_weights()],
        }
    return result


def elastic(strategy, runs):
    """Return DGC's memory at the start and at the end of some trainings."""
    result = {}
    for folder, epochs in (run.split(":") for run in runs):
        note = Note()
        model = make_model(strategy, "dgc")
        # All workers must save, each to a place of its own.
        place = saves(strategy.extended.worker_index)
        place.mkdir(exist_ok=True)
        checkpoint = keras.callbacks.ModelCheckpoint(place / f"{folder}.keras")
        fit(model, folder, note, checkpoint, epochs=int(epochs))
        model.save_weights(place / f"{folder}.weights.h5")
        tf.train.Checkpoint(model=model).write(place / folder)
        result[folder] = {
            "start": note.memory | {"step": note.start},
            "end": memory(model)
            | {"step": int(model.optimizer.iterations.numpy())},
            "weights": [w.tolist() for w in model.get_weights()],
        }
    return result


def main():
    """Run what the command line says."""
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    if sys.argv[1] == "equal":
        report(equal(strategy, map(int, sys.argv[2:])))
    else:
        report(elastic(strategy, sys.argv[2:]))


if __name__ == "__main__":
    main()
