"""A training that SIGTERM interrupts once, with trackers on the chief alone."""

import os
import pathlib
import signal
import sys
import time

STARTED = time.time()  # Before imports, which take seconds.

import keras  # noqa: E402
import numpy as np  # noqa: E402
import real_workers  # noqa: E402

import tf_optimizers as tfo  # noqa: E402

FOLDER = pathlib.Path(os.environ["FOLDER"])
RESTART = int(os.environ["TF_OPTIMIZERS_RESTART"])
X, Y = np.random.default_rng(0).random((2, 48, 8)).astype("float32")
STEP, STEPS = 8, 18  # The step with SIGTERM, and the steps of three epochs.


class Ask(keras.callbacks.Callback):
    """Sends SIGTERM to the second worker, in the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        if not RESTART and step == STEP and worker == 1:
            (FOLDER / "signal").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGTERM)


class NeedsAll(keras.callbacks.Callback):
    """Calls methods that need all workers, and keeps the errors."""

    def on_epoch_end(self, epoch, logs=None):
        self.errors = []
        (v, *_) = self.model.optimizer._compressor.residuals
        for act in (
            lambda: self.model.evaluate(X, Y, verbose=0),
            lambda: keras.ops.convert_to_numpy(v),
        ):
            try:
                act()
            except RuntimeError as error:
                self.errors.append(str(error))


def make_model():
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        optimizer = tfo.DGCMomentum(0.1, sparsity=(0.9,), min_compress_size=9)
        model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fit(model, *callbacks):
    model.fit(
        *(X, Y),
        batch_size=8,
        epochs=3,
        shuffle=False,
        verbose=0,
        validation_data=(X, Y),
        callbacks=list(callbacks),
    )
    return [weight.tolist() for weight in model.get_weights()]


strategy = tfo.SparseMultiWorkerMirroredStrategy()
worker = strategy.extended.worker_index
only = tfo.callbacks.ChiefOnly
needs_all = NeedsAll()
model = make_model()
begun = {}
weights = fit(
    model,
    tfo.callbacks.BackupAndRestore(FOLDER / "backup", save_freq=1000),
    keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: begun.update(
            step=int(model.optimizer.iterations.numpy())
        )
    ),
    tfo.callbacks.CompressionMonitor(every=2),
    only(keras.callbacks.CSVLogger(FOLDER / "log.csv", append=True)),
    only(keras.callbacks.TensorBoard(FOLDER / "tb", histogram_freq=1)),
    only(keras.callbacks.ProgbarLogger()),
    only(needs_all),
    Ask(),
)
stop = keras.callbacks.EarlyStopping("loss", baseline=0, patience=1)
try:
    if worker == 0:
        callback = only(stop)
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_epoch_end(0, {"loss": 1.0})
        callback.on_epoch_end(1, {"loss": 1.0})
except RuntimeError as error:
    needs_all.errors.append(str(error))
real_workers.report(
    {
        "pid": os.getpid(),
        "restart": RESTART,
        "started": STARTED,
        "stood_by": "stand-by" in sys.orig_argv,
        "begun": begun["step"],
        "equal": weights == fit(make_model()),
        "errors": getattr(needs_all, "errors", []),
    }
)
