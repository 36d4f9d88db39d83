"""A training with runs of Weights & Biases and MLflow on the chief only."""

import os
import pathlib

import keras
import numpy as np
import real_workers

import tf_optimizers as tfo

FOLDER = pathlib.Path(os.environ["FOLDER"])
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_DIR": str(FOLDER),
    "WANDB_SILENT": "true",
    "MLFLOW_TRACKING_URI": (FOLDER / "mlruns").as_uri(),
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
made = []


def make_wandb():
    import wandb
    from wandb.integration.keras import WandbMetricsLogger

    made.append(wandb.init(project="test"))
    return WandbMetricsLogger(log_freq=1)


def make_mlflow():
    import mlflow
    from mlflow.keras.callback import MlflowCallback

    made.append(mlflow.start_run())
    return MlflowCallback(log_every_epoch=True)


MAKERS = {"wandb": make_wandb, "mlflow": make_mlflow}
strategy = tfo.SparseMultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    model.compile(tfo.Lamb(0.01), "mse")
x = np.random.default_rng(0).random((32, 8)).astype("float32")
model.fit(
    *(x, x),
    batch_size=8,
    epochs=2,
    verbose=0,
    callbacks=[
        tfo.callbacks.TrustRatioMonitor(every=2),
        *(
            tfo.callbacks.ChiefOnly(MAKERS[name])
            for name in os.environ["TRACKERS"].split()
        ),
    ],
)
real_workers.report(len(made))
