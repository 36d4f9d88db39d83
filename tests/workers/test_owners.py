"""Owners of state can exchange any pieces of variables."""

import keras
import numpy as np
from arrays import assert_close
from one_process import run_twice

import tf_optimizers as tfo


def test_an_owner_may_have_one_row_of_a_matrix(ours, optimized_graphs):
    """The same message holds a part of another variable."""

    def train():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.compile(tfo.ShardedState(keras.optimizers.SGD(0.1)), "mse")
        rows = np.arange(16, dtype="float32").reshape(8, 2) / 16
        model.fit(rows, rows[::-1], batch_size=4, verbose=0)
        return model.get_weights()

    expected, weights = run_twice(ours, train)
    assert_close(weights, expected, rtol=0, atol=1e-6)
