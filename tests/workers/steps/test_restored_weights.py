"""Steps that move weights and restore them keep replicas equal."""

import cases
import custom_steps
import keras
import numpy as np
import pytest
import tensorflow as tf
from local import assert_copies_agree

from tf_optimizers.workers.steps.restored_weights import RestoredWeights


@pytest.mark.parametrize("eagerly", cases.with_long([False, True], [True]))
def test_sharp_steps_keep_weights_equal(ours, eagerly):
    keras.utils.set_random_seed(1)
    with ours.scope():
        model = custom_steps.Sharp()
    model.compile(custom_steps.sgd(), run_eagerly=eagerly)
    before = model.get_weights()
    model.fit(
        custom_steps.X,
        custom_steps.Y,
        batch_size=3,
        epochs=1 + 4 * (not eagerly),
        verbose=0,
    )
    for weight, start in zip(model.weights, before, strict=True):
        assert np.abs(weight - start).max() > 1e-3
    assert_copies_agree(ours, model.weights)


WEIGHTS = np.random.default_rng(0).standard_normal(1000)


def assigned(values, dtype="float32"):
    """Return a weight after a step has assigned to it."""
    weight = keras.Variable(WEIGHTS, dtype=dtype)
    start = tf.identity(weight.value)
    step = RestoredWeights()
    for value in values:
        weight.assign(step.exact(weight, value(weight)))
    return start, weight


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("steps", [1, 3])
def test_weights_are_put_back_to_the_bit(dtype, steps):
    """Integers are left unchanged."""
    rng = np.random.default_rng(1)
    moves = [
        tf.cast(rng.standard_normal(1000) / 3, dtype) for _ in range(steps)
    ]
    there = [lambda w, move=move: w + move for move in moves]
    back = [lambda w, move=move: w - move for move in moves]
    start, weight = assigned([*there, *back], dtype)
    np.testing.assert_array_equal(weight.value, start)
    plain = start
    for move in [*moves, *(-move for move in moves)]:
        plain += move
    assert np.any(plain.numpy() != start.numpy())


@pytest.mark.parametrize(
    "values",
    {
        "moved": [lambda w: w + 0.1],
        "decayed": [lambda w: w * (1 - 1e-7), lambda w: w * 1],
        "moved twice": [lambda w: w + 1e-6, lambda w: w - 0.9e-6],
        "one is not put back": [
            lambda w: w + 0.1,
            lambda w: w - 0.1 + np.eye(1, 1000)[0] * 1e-5,
        ],
    }.items(),
    ids=lambda pair: pair[0],
)
def test_weights_that_are_not_restored_are_kept(values):
    start, weight = assigned(values[1])
    plain = keras.Variable(start)
    for value in values[1]:
        plain.assign(value(plain))
    assert np.any(plain.numpy() != start.numpy())
    np.testing.assert_array_equal(weight.numpy(), plain.numpy())
