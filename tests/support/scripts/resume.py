"""Trainings that are backed up: `resume.py TASK...`.

equal            nested trainings of several optimizers, killed and resumed,
                 and the same without a kill
FOLDER:EPOCHS    a training of DGCMomentum, restored if there is a backup
FOLDER:flight    a training that is backed up during an exchange of entries
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

# The rounds of five steps end neither with epochs nor with backups.
ROUNDS = {
    name: functools.partial(
        lambda **kwargs: tfo.SparseLoCo(
            keras.optimizers.Adam(0.01),
            sync_every=5,
            sparsity=(0.9,),
            min_compress_size=1000,
            **kwargs,
        ),
        **kwargs,
    )
    for name, kwargs in {
        "rounds": {},
        "ahead": {"step_ahead": 0.5},
        "overlap": {"overlap": True},
    }.items()
}
NAMES = ["dgc", "adam_offload", "lamb", "lans", "loco", *ROUNDS]
X, Y = np.random.default_rng(0).random((2, 48, 40)).astype("float32")
EPOCHS, SAVE_EVERY = 2, 4
# One stage of compression is traced faster than several. With int4, v also
# holds rounding errors.
ELASTIC = functools.partial(
    tfo.DGCMomentum,
    0.1,
    sparsity=(0.99,),
    min_compress_size=1000,
    value_dtype="int4",
)
# Trainings have 24 steps. All are killed when each has made this many:
STEPS = dict(
    zip(
        NAMES, np.random.default_rng(0).integers(5, 23, len(NAMES)), strict=True
    )
)
# The worker that is killed; callbacks/test_faults.py kills the chief.
VICTIM = 1


class At(keras.callbacks.Callback):
    """Calls a function after the given step, counted over all epochs."""

    def __init__(self, step, action):
        super().__init__()
        self.step, self.action = step, action

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == self.step:
            self.action()


class Note(keras.callbacks.Callback):
    """Records the state when the training starts."""

    def on_train_begin(self, logs=None):
        self.step = int(self.model.optimizer.iterations.numpy())
        self.memory = memory(self.model)


def make_model(strategy, optimizer=ELASTIC):
    """Return a model of equal layers: XLA compiles for each new shape."""
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
    """Train on twelve batches per epoch."""
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
    """Return this worker's u and v: sums, a digest, whether replicas agree."""
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
        "equal": all(
            (part == each[0]).all() for each in parts for part in each
        ),
    }


def weights_of(model):
    return [w.tolist() for w in model.get_weights()]


def train(model, folder, *callbacks):
    """Train with a backup; return steps, memory and weights."""
    note = Note()
    fit(model, folder, note, *callbacks, save_freq=SAVE_EVERY)
    return {
        "start": note.step,
        "steps": int(model.optimizer.iterations.numpy()),
        "memory": memory(model)["own"],
        "weights": weights_of(model),
    }


def die(strategy, folder, names):
    """Start the trainings, one inside another, and die in a step of each."""
    if names:
        first, *others = names
        model = make_model(strategy, (OPTIMIZERS | ROUNDS)[first])
        inner = At(STEPS[first], lambda: die(strategy, folder, others))
        train(model, folder / first, inner)
    elif strategy.extended.worker_index == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)


def equal(strategy, folder):
    """Return each optimizer's result, with and without a kill."""
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
            # Reset the model, since a new one would be traced again.
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


def in_flight(strategy, folder):
    """Return SparseLoCo's state at a backup, and after a restore.

    The backup is made in the second round of five steps. The result holds the
    common weights, and the sum of this worker's changes that they lack.
    """
    model = make_model(strategy, ROUNDS["overlap"])
    rounds, found = model.optimizer._rounds, {}

    def sums(variables):
        local = strategy.experimental_local_results
        return [
            np.sum([part.numpy() for part in local(v)], 0, "float64")
            for v in variables
        ]

    def look(name):
        bases = sums(base.value for base in rounds._bases)
        moved = [
            (base - weight) / strategy.num_replicas_in_sync
            for base, weight in zip(bases, sums(rounds.variables), strict=True)
        ]
        compressor = model.optimizer._compressor
        held = sums(residual.value for residual in compressor.residuals)
        for i, residual in zip(compressor.compressed, held, strict=True):
            moved[i] += residual
        commons = [start.numpy() for _, start in rounds._starts]
        found[name] = {
            "taken": rounds.taken,
            "common": [weight.tolist() for weight in commons],
            "moved": [each.tolist() for each in moved],
        }

    resumed = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: look("start")
    )
    backed_up = At(7, lambda: look("backup"))
    fit(model, folder, resumed, backed_up, epochs=1, save_freq=7)
    return found | {"weights": weights_of(model)}


def elastic_and_saved(strategy, folder, epochs):
    """Run `elastic`; each worker also saves by Keras and by TensorFlow."""
    own = folder.parent / f"saves-{strategy.extended.worker_index}"
    own.mkdir()
    checkpoint = keras.callbacks.ModelCheckpoint(own / "model.keras")
    model, result = elastic(strategy, folder, epochs, checkpoint)
    model.save_weights(own / "model.weights.h5")
    tf.train.Checkpoint(model=model).write(own / "checkpoint")
    return model, result


def main():
    """Run the tasks of the command line."""
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    folder = pathlib.Path(os.environ["FOLDER"])
    result = {}
    for task in sys.argv[1:]:
        if task == "equal":
            result |= equal(strategy, folder)
            continue
        name, epochs = task.split(":")
        if epochs == "flight":
            result[task] = in_flight(strategy, folder / name)
            continue
        run = elastic_and_saved if task == "2:2" else elastic
        result[task] = run(strategy, folder / name, int(epochs))[1]
    report(result)


if __name__ == "__main__":
    main()
