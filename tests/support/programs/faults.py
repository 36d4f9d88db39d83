"""Workers that are not alike: `faults.py CASE`."""

import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_optimizers as tfo

CASE = sys.argv[1]
# What is wrong is wrong on the second worker.
IS_WRONG = '"index": 1' in os.environ["TF_CONFIG"]
X, Y = np.random.default_rng(0).random((2, 64, 8)).astype("float32")


def is_wrong(case):
    return IS_WRONG and case == CASE


def save_alone(model):
    """Try all ways to save, each of which must fail."""
    model.distribute_strategy.agreement_seconds = 2.0
    folder = pathlib.Path(os.environ["FOLDER"])
    ways = {
        "save": lambda: model.save(folder / "model.keras"),
        "save_weights": lambda: model.save_weights(folder / "w.weights.h5"),
        "checkpoint": lambda: tf.train.Checkpoint(model).write(folder / "c"),
    }
    for name, save in ways.items():
        try:
            save()
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
    raise RuntimeError("nothing could be saved")


class Misbehave(keras.callbacks.Callback):
    """Dies, falls silent or saves in the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and is_wrong("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if batch == 3 and is_wrong("silent"):
            time.sleep(1000)
        # As who saves on the chief only does.
        if batch == 3 and CASE == "saves alone" and not IS_WRONG:
            save_alone(self.model)


class SetRate(keras.callbacks.Callback):
    """Sets the rate on one worker, behind some batches of an epoch."""

    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def on_train_batch_end(self, batch, logs=None):
        if IS_WRONG and batch in self.rates:
            self.model.optimizer.learning_rate = self.rates[batch]


def part(model):
    """Part the rate of the workers, and then their weights."""
    try:
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[SetRate({7: 0.2})])
    except RuntimeError as error:
        print(f"rate: {error}", flush=True)
    model.optimizer.learning_rate = 0.1
    rates = SetRate({3: 0.2, 4: 0.1})
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[rates])


def main():
    """Train, with one thing amiss."""
    if CASE == "too late":
        tf.constant(1.0)
    if is_wrong("devices"):
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * 2,
        )
    strategy = tfo.SparseMultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(
            timeout_seconds=5.0 if CASE == "silent" else None
        )
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(9 if is_wrong("model") else 8),
            ]
        )
        momentum = 0.8 if is_wrong("settings") else 0.9
        optimizer = tfo.DGCMomentum(
            0.1, momentum=momentum, min_compress_size=1, sparsity=(0.9,)
        )
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
    optimizer.iterations.assign(7 if is_wrong("step") else 0)
    if is_wrong("absent"):
        time.sleep(1000)
    if CASE == "absent":
        strategy.agreement_seconds = 5.0
        gradients = [tf.zeros(v.shape) for v in model.trainable_variables]
        strategy.run(optimizer.apply, (gradients, model.trainable_variables))
    if CASE == "parted":
        part(model)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[Misbehave()])
    print("trained to the end")


if __name__ == "__main__":
    main()
