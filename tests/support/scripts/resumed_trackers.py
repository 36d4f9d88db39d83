"""A run whose worker is killed once, with the trackers of docs/callbacks.md."""

import os
import pathlib
import re
import signal

import keras
import numpy as np
import real_workers

import tf_optimizers as tfo

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "callbacks.md"
X, Y = np.random.default_rng(0).random((2, 48, 8)).astype("float32")
strategy = tfo.SparseMultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id


class Kill(keras.callbacks.Callback):
    """Kills worker 1 once, after the backup of the second epoch."""

    def on_epoch_end(self, epoch, logs=None):
        is_first = os.environ["TF_OPTIMIZERS_RESTART"] == "0"
        if is_first and (epoch, rank) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)


space = {"tfo": tfo}
(code,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.S)
exec(code, space)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
model.compile(tfo.Lamb(0.01), "mse")
history = model.fit(
    *(X, Y),
    epochs=3,
    verbose=0,
    callbacks=[
        tfo.callbacks.ChiefOnly(space["wandb_logger"]),
        tfo.callbacks.ChiefOnly(space["mlflow_callback"]),
        tfo.callbacks.BackupAndRestore(f"{os.environ['FOLDER']}/backup"),
        Kill(),
    ],
).history
real_workers.report(history)
