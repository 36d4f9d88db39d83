"""Training by `model.compile` and `fit`."""

import contextlib
import functools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf

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


def test_custom_loop_equals_fit(case):
    model = make_model()
    optimizer = case.make(clipnorm=1.0)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

    for _ in range(2):
        for start in range(0, 32, 8):
            step(X[start : start + 8], Y[start : start + 8])
    assert cases.error(model.get_weights(), weights_of(case)) < cases.ROUNDING


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
    for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


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

    for a, b in zip(weights(), weights(keras.Input((4,))), strict=True):
        np.testing.assert_array_equal(a, b)


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


@functools.cache
def moved(make, dtype):
    """Return how far a long run of small steps moves a kernel."""
    start = cases.make_values(shapes={"kernel": (4, 3)})[0]
    start = cases.as_numpy(tf.cast(start, "bfloat16"))
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, dtype=dtype)]
    )
    model.set_weights([start, np.zeros(3)])
    model.compile(make(1e-3), "mse")
    model.fit(X, Y, batch_size=8, epochs=25, verbose=0, shuffle=False)
    return cases.as_numpy(model.weights[0]) - start


@pytest.mark.long
def test_bfloat16_model_trains_as_its_float32_twin(case):
    """With the same steps, Keras's Lamb does not move."""

    def distance(a, b):
        return np.linalg.norm(a - b) / np.linalg.norm(b)

    full = moved(case.make, "float32")
    assert distance(moved(case.make, "bfloat16"), full) < 0.05
    assert distance(moved(keras.optimizers.Lamb, "bfloat16"), full) > 0.5


def test_copy_of_the_optimizer_starts_afresh(case):
    """`clone` and Keras Tuner copy by the config."""
    optimizer = case.make()
    cases.run(optimizer, cases.make_variables(), 2)
    copy = case.optimizer.from_config(optimizer.get_config())
    assert not copy.built
    actual = cases.run(copy, cases.make_variables(), 3)
    expected = cases.run_reference(case.reference_step(), 3)
    assert cases.error(actual, expected) < 1e-6


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_end_of_data_of_unknown_length_is_no_update(case):
    """Keras detects the end in a step without a batch."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    model = make_model()
    model.compile(case.make(), "mse")
    data = data.filter(lambda x, y: True)
    model.fit(data, epochs=2, verbose=0, shuffle=False)
    assert model.optimizer.iterations.numpy() == 8
