"""A model whose steps return arrays, and what it returns on a worker."""

import keras
import numpy as np
import real_workers
import tensorflow as tf

import tf_optimizers as tfo

X = np.arange(11, dtype="float32")[:, None] * [1, -1, 2]
MODES = {"compiled": False, "eager": True}


class ReturnsArrays(keras.Sequential):
    """Returns elements and means of the inputs; predicts the inputs."""

    def __init__(self):
        super().__init__([keras.Input((3,)), keras.layers.Identity()])

    def train_step(self, data):
        return self.test_step(data)

    def test_step(self, data):
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        rows = x[:, 0]
        if tf.executing_eagerly():
            rows = np.array(rows)
        return {
            "rows": rows,
            "both": x,
            "numbers": tf.cast(rows, tf.int32),
            "flags": rows > 2,
            "half": tf.cast(rows, tf.float16),
            "columns": tf.reduce_mean(x, 0),
            "constant": np.arange(3.0),
        }


def returned(eagerly):
    """Return what a model returns for batches of 8 and 3 rows, as lists."""
    model, found = ReturnsArrays(), {}

    def keep(name):
        return lambda batch, logs: found.update({f"{name}, {batch}": logs})

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=keep("fit"))
    callback.on_test_batch_end = keep("evaluate")
    model.compile(keras.optimizers.SGD(), run_eagerly=eagerly)
    options = {"batch_size": 8, "verbose": 0, "callbacks": [callback]}
    model.fit(X, shuffle=False, **options)
    model.evaluate(X, **options)
    for rows in (8, 3):
        for step in (model.train_on_batch, model.test_on_batch):
            found[f"{step.__name__}, {rows}"] = step(X[:rows], return_dict=True)
    found["predict"] = {
        "all": model.predict(X, batch_size=8, verbose=0),
        "batch": model.predict_on_batch(X[:3]),
    }
    return {
        place: {name: np.array(each).tolist() for name, each in logs.items()}
        for place, logs in found.items()
    }


if __name__ == "__main__":
    with tfo.SparseMultiWorkerMirroredStrategy().scope():
        real_workers.report({name: returned(MODES[name]) for name in MODES})
