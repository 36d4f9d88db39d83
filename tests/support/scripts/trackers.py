"""Trainings with Weights & Biases and MLflow, on all workers and on the chief.

The last training leaves its runs open, as many scripts do.
"""

import os
import random

import keras
import mlflow
import numpy as np
import real_workers
import wandb
from wandb.integration.keras import WandbMetricsLogger

import tf_optimizers as tfo

FOLDER = os.environ["FOLDER"]
X, Y = np.random.default_rng(0).random((2, 48, 8)).astype("float32")
mlflow.set_tracking_uri(f"sqlite:///{FOLDER}/mlflow.db")
strategy = tfo.SparseMultiWorkerMirroredStrategy()


class Shuffled(keras.utils.PyDataset):
    """Batches in random order. Python draws it, like the names of MLflow."""

    order = np.arange(6)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        rows = slice(8 * self.order[index], 8 * self.order[index] + 8)
        return X[rows], Y[rows]

    def on_epoch_begin(self):
        self.order = random.sample(range(6), 6)


def train(name, wrap):
    """Train with both trackers, under this name; return the history."""

    def wandb_logger():
        wandb.init(project=name, mode="offline", dir=f"{FOLDER}/{name}")
        return WandbMetricsLogger()

    def mlflow_callback():
        mlflow.set_experiment(name)
        mlflow.start_run()
        return mlflow.keras.MlflowCallback()

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        optimizer = tfo.DGCMomentum(0.1, sparsity=(0.9,), min_compress_size=9)
        model.compile(optimizer, "mse")
    monitor = tfo.callbacks.CompressionMonitor(every=2)
    return model.fit(
        Shuffled(),
        epochs=2,
        verbose=0,
        validation_data=(X, Y),
        callbacks=[monitor, wrap(wandb_logger), wrap(mlflow_callback)],
    ).history


history = {"all": train("all", lambda make: make())}
wandb.finish()
mlflow.end_run()
history["chief"] = train("chief", tfo.callbacks.ChiefOnly)
real_workers.report(history)
