"""Data that servers of `tf.data` prepare, for two workers."""

import os

import keras
import numpy as np
import real_workers
import tensorflow as tf

import tf_optimizers as tfo

ROWS = np.random.default_rng(0).random((72, 8)).astype("float32")
strategy = tfo.SparseMultiWorkerMirroredStrategy()


def batches(size):
    keras.utils.set_random_seed(1)  # The order depends on the size, too.
    data = tf.data.Dataset.from_tensor_slices((ROWS, ROWS[:, :2]))
    data = data.shuffle(72, seed=1, reshuffle_each_iteration=False)
    return data.batch(size, drop_remainder=True)


def prepared(data, mode="parallel_epochs", **kwargs):
    """Let the servers run all earlier transformations."""
    service = os.environ["SERVICE"]
    return data.apply(
        tf.data.experimental.service.distribute(mode, service, **kwargs)
    )


def train(data):
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        model.compile(tfo.Lamb(0.01), "mse")
    history = model.fit(data, epochs=2, verbose=0).history
    return [w.tolist() for w in model.get_weights()], history["loss"]


def each_its_own(context):
    """Return one worker's batches, which servers distribute in any order."""
    del context
    return prepared(batches(4), "distributed_epoch", job_name="shared")


real_workers.report(
    {
        "local": train(batches(8)),
        "served": train(prepared(batches(8))),
        "shared": train(
            strategy.distribute_datasets_from_function(each_its_own)
        ),
    }
)
