"""Checkpoints of a strategy, restored under it or under another strategy."""

import os
import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf
from strategies.table import Table, in_graph, replica_number

import tf_optimizers as tfo

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "lamb": lambda: tfo.Lamb(0.1),
    "lans": lambda: tfo.LANS(0.1),
    "adam_offload": lambda: tfo.AdamOffload(0.1),
    "dgc": lambda: tfo.DGCMomentum(0.1, min_compress_size=8, sparsity=(0.5,)),
}
_OF_KERAS = ("sgd", "adam")
TABLE = Table()


class Training:
    """Trains a table and a kernel; each replica also counts rows."""

    def __init__(self, strategy, name, is_dense):
        self.strategy = strategy
        self.is_dense = is_dense
        with strategy.scope():
            self.variables = [
                keras.Variable(np.linspace(-1, 1, 18).reshape(6, 3), name="t"),
                keras.Variable(np.linspace(0, 1, 9).reshape(3, 3), name="k"),
            ]
            self.optimizer = OPTIMIZERS[name]()
            self.optimizer.build(self.variables)
            self.rows = tf.Variable(
                0,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

    def step(self):
        rows = tf.constant([replica_number(), 3, 3])
        with tf.GradientTape() as tape:
            table, kernel = (v.value for v in self.variables)
            outputs = tf.gather(table, rows) @ kernel
            loss = tf.reduce_mean(outputs**2) * (replica_number() + 1)
        gradients = tape.gradient(loss, [v.value for v in self.variables])
        if self.is_dense:
            gradients = list(map(tf.convert_to_tensor, gradients))
        self.optimizer.apply(gradients, self.variables)
        self.rows.assign_add(replica_number() + 1)

    def train(self, steps):
        for _ in range(steps):
            in_graph(self.strategy, self.step)
        # Of optimizer variables that differ by replica, the sum is restored.
        return [
            *(v.numpy().tolist() for v in self.variables),
            *(np.array(v).tolist() for v in self.optimizer.variables),
            int(self.rows.numpy()),
        ]

    def checkpoint(self):
        return tf.train.Checkpoint(
            variables=[v.value for v in self.variables],
            optimizer=self.optimizer,
            rows=self.rows,
        )


def restored(strategy, other, name, is_dense=False):
    """Train and save; restore and train under the other strategy."""
    folder = tempfile.mkdtemp(dir=os.environ["FOLDER"])
    training = Training(strategy, name, is_dense)
    before = training.train(2)
    path = training.checkpoint().save(pathlib.Path(folder) / "checkpoint")
    following = Training(other, name, is_dense)
    following.checkpoint().restore(path).assert_consumed()
    assert following.train(0) == before
    return [before, following.train(2)]


def _add_restored(name):
    TABLE.add(
        f"{name}, other strategy",
        lambda s, other: restored(s, other, name, is_dense=name in _OF_KERAS),
    )
    kwargs = {}
    if name in _OF_KERAS:
        kwargs = {
            "instead": lambda s, other: restored(s, s, name, is_dense=True),
            "reason": "ours sums repeated rows",
        }
    TABLE.add(
        f"{name}, same strategy",
        lambda s, other: restored(s, s, name),
        **kwargs,
    )


for _name in OPTIMIZERS:
    _add_restored(_name)
