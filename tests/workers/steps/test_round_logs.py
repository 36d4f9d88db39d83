"""Steps between exchanges repeat the last logs."""

import gc

import keras
import pytest
import tensorflow as tf

from tf_optimizers.workers.steps import round_logs
from tf_optimizers.wrapped import LocalRound


def traced(ours, model, dtype="float32", overlaps=False):
    @tf.function
    def step(value, ends):
        each = tf.distribute.Strategy.run(ours, lambda: tf.identity(value))
        current = LocalRound(ends, 3, overlaps)
        return round_logs.sum_in_rounds(ours, model, current, each)

    def logs(value, ends=False):
        value = tf.constant([value], dtype)
        return float(step(value, tf.constant(ends))[0])

    logs(0.0)
    return logs


def test_reduced_logs_live_as_long_as_the_function_that_reduces_them(ours):
    model = keras.Sequential()
    functions = [traced(ours, model) for _ in range(3)]
    assert len(round_logs._kept[model]) == 3
    logs = functions.pop()
    functions.clear()
    gc.collect()
    assert len(round_logs._kept[model]) == 1
    assert logs(1.0, ends=True) == 2.0
    # Without a round that ends, it repeats the last sum until that is too old.
    assert [logs(2.0) for _ in range(4)] == [2.0, 2.0, 2.0, 4.0]
    round_logs.reduce_in_next_step(model)
    assert logs(3.0) == 6.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_logs_of_any_dtype_arrive_in_the_next_round(ours, dtype):
    """TensorFlow does not send bfloat16."""
    logs = traced(ours, keras.Sequential(), dtype, overlaps=True)
    assert [logs(1.5, ends=True), logs(2.5)] == [0.0, 0.0]
    assert logs(3.5, ends=True) == 3.0
