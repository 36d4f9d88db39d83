"""LansSchedule against the paper's formula."""

import json

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_equal

from tf_optimizers.schedules import LansSchedule


def paper(t, rate, warmup, constant, total):
    """Return the rate of update t, from 1, by arXiv:2006.13484, Section 3.3."""
    if t <= warmup:
        return rate * t / warmup
    if t <= warmup + constant:
        return rate
    return rate * (total - t) / (total - warmup - constant)


@pytest.mark.parametrize(
    ("warmup", "constant", "decay"), [(10, 20, 30), (0, 5, 7), (4, 0, 3)]
)
def test_schedule_matches_the_paper(warmup, constant, decay):
    schedule = LansSchedule(0.5, warmup, constant, decay)
    total = warmup + constant + decay
    actual = [float(schedule(step)) for step in range(total)]
    expected = [
        paper(t, 0.5, warmup, constant, total) for t in range(1, total + 1)
    ]
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-8)
    assert actual[0] > 0


@pytest.fixture
def floatx():
    """Return a function that sets Keras's default dtype."""
    before = keras.config.floatx()
    yield keras.config.set_floatx
    keras.config.set_floatx(before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_steps_count_on_in_any_floatx(dtype, floatx):
    """Float16 ends at 65,504, and bfloat16 cannot represent 257."""
    floatx(dtype)
    schedule = LansSchedule(0.5, 300, 100, 99_600)
    for t in (1, 257, 300, 400, 65_505, 70_001, 99_999):
        expected = paper(t, 0.5, 300, 100, 100_000)
        assert float(schedule(t - 1)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@cases.EACH_KIND
def test_steps_are_the_same_in_any_floatx(case, dtype, floatx):
    """Late steps have the same rate and corrections, with float32 weights."""

    def train(dtype):
        floatx(dtype)
        optimizer = case.make(LansSchedule(0.5, 300, 100, 99_600))
        variables = cases.make_variables("float32")
        optimizer.build(variables)
        optimizer.iterations.assign(70_000)
        return cases.run(optimizer, variables, 2)

    assert_equal(train(dtype), train("float32"))


def test_polynomial_decay_matches_keras():
    ours = LansSchedule(0.5, 0, 0, 8, end_learning_rate=0.1, power=2.0)
    theirs = keras.optimizers.schedules.PolynomialDecay(0.5, 8, 0.1, power=2.0)
    # Keras's first update has the full rate; ours is one step into the decay.
    for step in range(12):
        expected = float(theirs(step + 1))
        assert float(ours(step)) == pytest.approx(expected, rel=1e-6)


def test_schedule_stays_at_its_end():
    assert float(LansSchedule(0.5, 1, 1, 1, 0.25)(1000)) == 0.25


def test_schedule_takes_tensors_and_variables_in_a_graph():
    schedule = LansSchedule(1.0, 4, 1, 5)
    graph = tf.function(schedule)
    for step in (0, 4, 7):
        assert float(graph(tf.constant(step, "int64"))) == float(schedule(step))


def test_schedule_survives_json():
    schedule = LansSchedule(0.5, 3, 4, 5, 0.1, 2.0, name="warm")
    config = json.loads(
        json.dumps(keras.optimizers.schedules.serialize(schedule))
    )
    restored = keras.optimizers.schedules.deserialize(config)
    assert isinstance(restored, LansSchedule)
    assert restored.get_config() == schedule.get_config()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 1, 1, 1), ValueError, "`learning_rate` must be a finite"),
        (("x", 1, 1, 1), TypeError, "`learning_rate` must be a finite"),
        ((0.1, -1, 1, 1), ValueError, "`warmup_steps` must be an integer >= 0"),
        ((0.1, 1.5, 1, 1), TypeError, "`warmup_steps` must be an integer"),
        ((0.1, 1, -1, 1), ValueError, "`constant_steps` must be"),
        ((0.1, 1, 1, 0), ValueError, "`decay_steps` must be an integer >= 1"),
        ((0.1, 1, 1, 1, -0.1), ValueError, "`end_learning_rate` must be"),
        ((0.1, 1, 1, 1, 0.0, 0.0), ValueError, "`power` must be"),
    ],
)
def test_bad_argument_is_rejected(arguments, error, message):
    with pytest.raises(error, match=message):
        LansSchedule(*arguments)
