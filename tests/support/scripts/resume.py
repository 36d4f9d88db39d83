"""Trainings that are backed up: `resume.py TASK...`.

equal            one optimizer's inside of another's, killed, resumed, and
                 once more without
FOLDER:EPOCHS    DGCMomentum's, restored if it can be
"""

import functools
import hashlib
import os
import pathlib
import signal
import sys

import keras
import numpy as np
import tensorflow as tf
from real_workers import report
from scripts.training import OPTIMIZERS

import tf_optimizers as tfo
from tf_optimizers.callbacks.backup.state import State

# Rounds end neither with epochs nor with backups.
ROUNDS = {
    "rounds": lambda: tfo.SparseLoCo(
        keras.optimizers.Adam(0.01),
        sync_every=5,
        sparsity=(0.9,),
        min_compress_size=1000,
    )
}
NAMES = ["dgc", "adam_offload", "lamb", "lans", "loco", *ROUNDS]
X, Y = np.random.default_rng(0).random((2, 48, 40)).astype("float32")
EPOCHS, SAVE_EVERY = 2, 4
# With one stage of compression, which is traced faster than several. What
# rounding takes away is in v, too.
ELASTIC = functools.partial(
    tfo.DGCMomentum,
    0.1,
    sparsity=(0.99,),
    min_compress_size=1000,
    value_dtype="int4",
)
# How many each has made when all are killed, of 24.
STEPS = dict(
    zip(
        NAMES, np.random.default_rng(0).integers(5, 23, len(NAMES)), strict=True
    )
)
# Who is; callbacks/test_faults.py kills the chief.
VICTIM = 1


class At(keras.callbacks.Callback):
    """Does something after so many steps, counted over all epochs."""

    def __init__(self, step, action):
        super().__init__()
        self.step, self.action = step, action

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == self.step:
            self.action()


class Note(keras.callbacks.Callback):
    """Notes what there is when the training starts."""

    def on_train_begin(self, logs=None):
        self.step = int(self.model.optimizer.iterations.numpy())
        self.memory = memory(self.model)


def make_model(strategy, optimizer=ELASTIC):
    """Two layers of one shape, as every shape costs a kernel of XLA."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((40,)),
                keras.layers.Dense(40, activation="relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(40),
            ]
        )
        model.compile(optimizer(), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model, folder, *callbacks, epochs=EPOCHS, save_freq="epoch"):
    """Twelve batches an epoch."""
    backup = tfo.callbacks.BackupAndRestore(
        folder, save_freq, delete_checkpoint=False
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


def weights_of(model):
    return [w.tolist() for w in model.get_weights()]


def train(model, folder, *callbacks):
    """Return what has become of a training."""
    note = Note()
    fit(model, folder, note, *callbacks, save_freq=SAVE_EVERY)
    return {
        "start": note.step,
        "steps": int(model.optimizer.iterations.numpy()),
        "memory": memory(model)["own"],
        "weights": weights_of(model),
    }


def die(strategy, folder, names):
    """Come to a step of each training, one inside of the other; end there."""
    if names:
        first, *others = names
        model = make_model(strategy, (OPTIMIZERS | ROUNDS)[first])
        inner = At(STEPS[first], lambda: die(strategy, folder, others))
        train(model, folder / first, inner)
    elif strategy.extended.worker_index == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)


def equal(strategy, folder):
    """Return each optimizer's training, killed and not."""
    if os.environ["TF_OPTIMIZERS_RESTART"] == "0":
        die(strategy, folder / "killed", NAMES)
    result = {"killed": {}, "alone": {}}
    for name in NAMES:
        model = make_model(strategy, (OPTIMIZERS | ROUNDS)[name])
        state = State(model)
        parts = [
            part
            for variable in state.sections["lasting"]
            for part in state.components(variable)
        ]
        initial = [part.numpy() for part in parts]
        for kind, trainings in result.items():
            # Again from the start; a new model would be traced again.
            for part, value in zip(parts, initial, strict=True):
                part.assign(value)
            trainings[name] = train(model, folder / kind / name)
    return result


def elastic(strategy, folder, epochs, *callbacks):
    """Return DGC's memory at the start and at the end of a training."""
    note = Note()
    model = make_model(strategy)
    fit(model, folder, note, *callbacks, epochs=epochs)
    return model, {
        "start": note.memory | {"step": note.step},
        "end": memory(model)
        | {"step": int(model.optimizer.iterations.numpy())},
        "weights": weights_of(model),
    }


def elastic_and_saved(strategy, folder, epochs):
    """Save by Keras and TensorFlow too, as every worker must for itself."""
    own = folder.parent / f"saves-{strategy.extended.worker_index}"
    own.mkdir()
    checkpoint = keras.callbacks.ModelCheckpoint(own / "model.keras")
    model, result = elastic(strategy, folder, epochs, checkpoint)
    model.save_weights(own / "model.weights.h5")
    tf.train.Checkpoint(model=model).write(own / "checkpoint")
    return model, result


def main():
    """Run what the command line says."""
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    folder = pathlib.Path(os.environ["FOLDER"])
    result = {}
    for task in sys.argv[1:]:
        if task == "equal":
            result |= equal(strategy, folder)
            continue
        name, epochs = task.split(":")
        run = elastic_and_saved if task == "2:2" else elastic
        result[task] = run(strategy, folder / name, int(epochs))[1]
    report(result)


if __name__ == "__main__":
    main()
