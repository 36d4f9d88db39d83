"""`ShardedState` of variables whose parts have the shapes [2] and [2, 1]."""

import keras
import numpy as np
import tensorflow as tf
from real_workers import report

import tf_optimizers as tfo

X = np.random.default_rng(0).random((6, 6)).astype("float32")


def trained(strategy):
    """Return the trained weights."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.PReLU("glorot_uniform"),
                keras.layers.Dense(1),
            ]
        )
        optimizer = tfo.ShardedState(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse")
    model.fit(X, X[:, :1], batch_size=6, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


if __name__ == "__main__":
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": False}  # As by default, unlike other tests.
    )
    weights = trained(tfo.SparseMultiWorkerMirroredStrategy())
    report([weight.tolist() for weight in weights])
