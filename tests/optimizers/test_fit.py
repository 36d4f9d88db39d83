"""Training by `model.compile` and `fit`."""

import contextlib
import functools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_equal

pytestmark = cases.EACH_KIND

X = np.random.default_rng(0).standard_normal((32, 4)).astype("float32")
Y = np.random.default_rng(1).standard_normal((32, 3)).astype("float32")


def make_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )


def fit(optimizer, **kwargs):
    model = make_model()
    model.compile(optimizer, "mse", **kwargs)
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return model


@functools.cache
def weights_of(case):
    """Return the weights after a plain `fit`."""
    return fit(case.make(clipnorm=1.0)).get_weights()


@pytest.mark.parametrize(
    "kwargs",
    cases.with_long(
        [
            {"jit_compile": True},
            {"run_eagerly": True},
            {"steps_per_execution": 4},
        ],
        [{"run_eagerly": True}],  # The contract compares steps.
    ),
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_modes_of_fit_agree(case, kwargs):
    is_xla = "jit_compile" in kwargs
    with case.where_xla_runs() if is_xla else contextlib.nullcontext():
        actual = fit(case.make(clipnorm=1.0), **kwargs).get_weights()
    assert cases.error(actual, weights_of(case)) < cases.ROUNDING
    start = make_model().get_weights()
    assert np.abs(actual[0] - start[0]).max() > 1e-2


@cases.needs_groups
def test_groups_survive_a_keras_file(case, tmp_path):
    groups = keras.optimizers.OptimizerMap(
        case.make(), {".*bias": case.make(0.1, weight_decay=0.0)}
    )
    model = fit(keras.optimizers.MultiOptimizer(groups))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit(X, Y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    assert_equal(model.get_weights(), loaded.get_weights())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "dtype", cases.with_long(["float16", "bfloat16"], ["float16"])
)
def test_half_precision_model_is_built_by_its_first_step(case, dtype):
    """Without an `Input`, a model has no weights before or during the trace."""

    def weights(*inputs):
        keras.utils.set_random_seed(0)
        layer = keras.layers.Dense(3, dtype=dtype)
        model = keras.Sequential([*inputs, layer])
        model.compile(case.make(), "mse")
        model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
        return map(cases.as_numpy, model.get_weights())

    assert_equal(weights(), weights(keras.Input((4,))))


def test_mixed_precision_policy_trains(case):
    """`mixed_float16` wraps the optimizer in dynamic loss scaling."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = fit(case.make(clipnorm=1.0))
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert cases.error(model.get_weights(), weights_of(case)) < 0.02
    assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_end_of_data_of_unknown_length_is_no_update(case):
    """Keras detects the end in a step without a batch."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    model = make_model()
    model.compile(case.make(), "mse")
    data = data.filter(lambda x, y: True)
    model.fit(data, epochs=2, verbose=0, shuffle=False)
    assert model.optimizer.iterations.numpy() == 8
