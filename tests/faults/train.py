"""The training that faults are tried on: `train.py FOLDER OPTIMIZER`.

A worker writes events to FOLDER/events-PLACE, as lines of JSON. FOLDER/fault,
if it exists, names a fault of the second worker's script. FOLDER/stall holds
the end of a file's name; writing such a file stalls.
"""

import hashlib
import json
import os
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_optimizers as tfo

FOLDER = pathlib.Path(sys.argv[1])
EPOCHS, STEPS, BATCH = 10, 20, 4
SAVE_EVERY = 10
# Long enough for a fault to hit the middle of the training.
PAUSE = 0.05
X, Y = np.random.default_rng(0).random((2, STEPS * BATCH, 64)).astype("float32")
PLACE = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def is_wrong(name):
    """Return whether this worker has a fault."""
    path = FOLDER / "fault"
    return PLACE == 1 and path.exists() and path.read_text() == name


def stall(events, flush=os.fsync):
    """Stall halfway through writing a file that FOLDER/stall names."""

    def fsync(file):
        order = FOLDER / "stall"
        name = os.readlink(f"/proc/self/fd/{file}")
        if order.exists() and name.endswith(order.read_text()):
            os.ftruncate(file, os.fstat(file).st_size // 2)
            events.write("stall")
            time.sleep(1000)
        flush(file)

    os.fsync = fsync


class Events(keras.callbacks.Callback):
    """Records every step, and the fault that this worker causes."""

    def __init__(self):
        super().__init__()
        self.file = (FOLDER / f"events-{PLACE}").open("a", buffering=1)
        self.steps = 0

    def write(self, event, **more):
        line = {
            "time": time.time(),
            "pid": os.getpid(),
            "event": event,
            "step": int(self.model.optimizer.iterations.numpy()),
        }
        self.file.write(json.dumps(line | more) + "\n")

    def on_train_begin(self, logs=None):
        self.steps = int(self.model.optimizer.iterations.numpy())
        self.write("begin")

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() > self.steps:
            time.sleep(PAUSE)  # Not after a batch that was only skipped.
        self.write("step")

    def on_train_end(self, logs=None):
        weights = b"".join(w.tobytes() for w in self.model.get_weights())
        self.write("end", weights=hashlib.sha256(weights).hexdigest())


@keras.saving.register_keras_serializable()
class Loss(keras.losses.MeanSquaredError):
    """Lets a worker's gradient be NaN or infinite."""

    def call(self, y_true, y_pred):
        loss = super().call(y_true, y_pred)
        for name in ("nan", "inf"):
            if PLACE == 1:
                is_now = tf.py_function(lambda n=name: is_wrong(n), [], tf.bool)
                loss *= tf.where(tf.ensure_shape(is_now, []), float(name), 1.0)
        return loss


OPTIMIZERS = {
    "DGCMomentum": lambda: tfo.DGCMomentum(
        0.05,
        momentum=0.8 if is_wrong("version") else 0.9,
        sparsity=(0.99,),
        min_compress_size=1000,
    ),
    "ShardedState": lambda: tfo.ShardedState(keras.optimizers.AdamW(0.001)),
}


def main():
    """Train, and record the end."""
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dropout(0.1),
                keras.layers.Dense(64),
            ]
        )
        model.compile(OPTIMIZERS[sys.argv[2]](), Loss())
    events = Events()
    stall(events)
    backup = tfo.callbacks.BackupAndRestore(
        FOLDER / "backup",
        save_freq=SAVE_EVERY,
        double_checkpoint=True,
        delete_checkpoint=False,
    )
    model.fit(
        *(X, Y),
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[backup, events],
    )


if __name__ == "__main__":
    main()
