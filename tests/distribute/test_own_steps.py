"""Losses, metrics and steps that users write compute what one process does."""

import cases
import own_steps
import pytest
import tensorflow as tf

import tf_optimizers as tfo

# Float32 sums in another order, over steps that move by more than 1e-2.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def ours():
    """Two replicas in this process."""
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 2
    return strategy


@pytest.mark.parametrize("name", own_steps.CASES)
def test_own_steps_equal_one_process(ours, name):
    expected, expected_logs = own_steps.fit(name)
    with ours.scope():
        actual, logs = own_steps.fit(name)
    pairs = actual.trainable_variables, expected.trainable_variables
    assert cases.error(*pairs) < TOLERANCE
    assert cases.error(logs, expected_logs) < 1e-5


def test_predictions_are_those_of_the_rows(ours):
    expected = own_steps.predictions()
    with ours.scope():
        assert own_steps.predictions() == expected


DTYPES = [
    *("bool", "uint8", "int8", "int16", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "int64", "complex64", "complex128", "string"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_any_dtype_are_joined(ours, dtype):
    """Two rows of one replica, and one of the other."""
    numbers = tf.constant([[0, 1], [2, 3], [100, 0]])
    if dtype == "string":
        rows = tf.strings.as_string(numbers) + tf.constant([["", "\u00e9\0."]])
    else:
        rows = tf.cast(numbers, dtype)
    if rows.dtype.is_complex:
        rows *= 1 + 2j
    parts = ours.experimental_distribute_values_from_function(
        lambda c: rows[2:] if c.replica_id_in_sync_group else rows[:2]
    )
    joined = [ours.gather(parts, 0), tf.function(ours.gather)(parts, 0)]
    for value in joined:
        assert value.dtype == rows.dtype
        assert value.numpy().tolist() == rows.numpy().tolist()


def test_strings_of_a_replica_without_any_are_joined(ours):
    empty = tf.zeros([0], tf.string)
    parts = ours.experimental_distribute_values_from_function(
        lambda c: (
            empty if c.replica_id_in_sync_group else tf.constant(["a", ""])
        )
    )
    assert ours.gather(parts, 0).numpy().tolist() == [b"a", b""]
