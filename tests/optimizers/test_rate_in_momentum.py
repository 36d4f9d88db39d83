"""Every gradient is multiplied by the learning rate of its own step."""

import dgc
import keras
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_equal
from cases import with_long
from dgc import SHAPES, start

import tf_optimizers as tfo

RATES = [0.1, 0.2, 0.2, 0.05, 0.05, 0.0, 0.01, 0.01, 0.003, 0.001]
BOUNDARIES = list(range(len(RATES) - 1))
WHOLE = {"sparsity": (0.0,), "momentum_masking": False}
NONE = tf.distribute.get_strategy()

pytestmark = pytest.mark.filterwarnings(
    "ignore:DGCMomentum saves traffic:UserWarning"
)


def gradients_of(step, scale=1.0):
    gradients = dgc.make_gradients(step, SHAPES.values(), 2)
    return [[np.float32(scale) * g for g in each] for each in gradients]


def schedule():
    return keras.optimizers.schedules.PiecewiseConstantDecay(BOUNDARIES, RATES)


def keras_sgd(rate, **kwargs):
    """Return the weights after each step of `keras.optimizers.SGD`."""
    variables = [keras.Variable(v) for v in start().values()]
    optimizer = keras.optimizers.SGD(rate, **{"momentum": 0.9} | kwargs)
    after = []
    for step in range(len(RATES)):
        sums = [sum(each) for each in zip(*gradients_of(step), strict=True)]
        optimizer.apply(sums, variables)
        after.append([v.numpy() for v in variables])
    return after


@pytest.mark.parametrize("nesterov", with_long([False, True], [False]))
@pytest.mark.parametrize(
    "settings",
    [
        WHOLE,
        WHOLE | {"value_dtype": "float16"},
        WHOLE | {"rampdown_begin_step": 4},
        *with_long(
            [{"rampup_begin_step": 100}, {"min_compress_size": 1000}],
            [{"rampup_begin_step": 100}],
        ),
    ],
    ids=["whole", "whole, float16", "whole, then dense", "dense", "small"],
)
def test_without_residuals_it_is_keras_sgd(mirrored, settings, nesterov):
    expected = keras_sgd(schedule(), nesterov=nesterov)
    run = dgc.Run(mirrored, start(), schedule(), nesterov=nesterov, **settings)
    for step, weights in enumerate(expected):
        run.step(gradients_of(step))
        assert dgc.worst(run.weights(), weights) < 3e-7
    other = keras_sgd(schedule(), nesterov=not nesterov)
    assert dgc.worst(run.weights(), other[-1]) > 1e-2


def test_loss_scale_and_accumulation_are_those_of_keras_sgd(mirrored):
    twice = {"gradient_accumulation_steps": 2, "loss_scale_factor": 4.0}
    run = dgc.Run(mirrored, start(), **WHOLE | twice)
    for step, rate in enumerate(RATES):
        run.optimizer.learning_rate = rate
        for _ in range(2):
            run.step(gradients_of(step, 4.0))
    assert dgc.worst(run.weights(), keras_sgd(schedule())[-1]) < 3e-7


@pytest.mark.parametrize(
    "dtype",
    with_long(
        ["float16", "bfloat16", "int4", "int2"], ["float16", "bfloat16", "int2"]
    ),
)
def test_values_of_a_tiny_rate_do_not_vanish(mirrored, dtype):
    """Values times 1e-6 are rounded like the values; float16 has no 1e-9."""
    zeros = dgc.zeros()
    run = dgc.Run(mirrored, zeros, sparsity=(0.5,), value_dtype=dtype)

    def trained_at(rate):
        run.restart(zeros, rate)
        for step in range(10):
            run.step(gradients_of(step, 1e-3))
        return run.weights()

    for small, large in zip(trained_at(2.0**-20), trained_at(1.0), strict=True):
        np.testing.assert_array_equal(2.0**20 * small, large)
    assert all(np.count_nonzero(w) == w.size for w in trained_at(1e-6))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rate_of_zero_changes_only_residuals(mirrored, dtype):
    run = dgc.Run(mirrored, start(), 0.0, sparsity=(0.5,), value_dtype=dtype)
    run.step(gradients_of(0))
    assert_equal(run.weights(), start().values())
    run.optimizer.learning_rate = 0.1
    run.step(gradients_of(1))
    held = [sum(v) for v in run.memory("residual")]
    before = run.weights()
    run.optimizer.learning_rate = 0.0
    for _ in range(60):
        run.step(gradients_of(2))
    drained = [b - w for b, w in zip(before, run.weights(), strict=True)]
    assert min(np.abs(total).max() for total in held) > 1e-3
    assert all(np.isfinite(total).all() for total in drained)
    left = [sum(v) for v in run.memory("residual")]
    assert max(np.abs(total).max() for total in left) < 1e-6


@pytest.fixture(scope="module", params=[True, False])
def rule(request):
    return request.param


@pytest.fixture(scope="module")
def trained(mirrored, rule):
    """Return a run of three steps."""
    settings = {"sparsity": (0.75,), "rate_in_momentum": rule}
    run = dgc.Run(mirrored, start(), **settings)
    for step in range(3):
        run.step(gradients_of(step))
    return run


def test_checkpoint_of_the_other_rule_is_rejected(
    mirrored, trained, rule, tmp_path
):
    """The error comes before anything is restored, even without a build."""
    checkpoint = tf.train.Checkpoint(
        weight=trained.variables[0].value, optimizer=trained.optimizer
    )
    path = checkpoint.write(tmp_path / "c")
    own = dgc.Run(mirrored, start(), rate_in_momentum=rule)
    tf.train.Checkpoint(optimizer=own.optimizer).read(
        path
    ).assert_existing_objects_matched()
    for actual, expected in zip(
        own.memory("momentum"), trained.memory("momentum"), strict=True
    ):
        np.testing.assert_allclose(sum(actual), sum(expected), rtol=1e-6)
    other = dgc.Run(mirrored, start(), rate_in_momentum=not rule)
    weight = other.variables[0]
    with pytest.raises(ValueError, match="as when the state was saved"):
        tf.train.Checkpoint(
            weight=weight.value, optimizer=other.optimizer
        ).read(path)
    np.testing.assert_array_equal(weight, start()["kernel"])
    unbuilt = tfo.DGCMomentum(0.1, rate_in_momentum=not rule)
    with pytest.raises(ValueError, match="as when the state was saved"):
        tf.train.Checkpoint(optimizer=unbuilt).read(path)


def test_config_without_the_rule_is_of_an_older_version():
    config = tfo.DGCMomentum(0.1).get_config()
    assert config.pop("rate_in_momentum") is True
    assert tfo.DGCMomentum.from_config(config).rate_in_momentum is False


def model_of(rule):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(
        tfo.DGCMomentum(
            0.1, min_compress_size=1, sparsity=(0.5,), rate_in_momentum=rule
        ),
        "mse",
        run_eagerly=True,
    )
    model.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0)
    return model


def test_model_files_keep_the_rule(rule, tmp_path):
    model = model_of(rule)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.rate_in_momentum is rule
    assert_equal(model.optimizer.variables, loaded.optimizer.variables)
    model.save_weights(tmp_path / "model.weights.h5")
    model_of(rule).load_weights(tmp_path / "model.weights.h5")
    message = (
        f"Received: rate_in_momentum={not rule}, and state saved with "
        f"rate_in_momentum={rule}. Pass"
    )
    other = model_of(not rule)
    before = [variable.numpy() for variable in other.optimizer.variables]
    with pytest.raises(ValueError, match=message):
        other.load_weights(tmp_path / "model.weights.h5")
    assert_equal(other.optimizer.variables, before)


@pytest.mark.parametrize("rule", with_long([True, False], [True]))
def test_backup_of_the_other_rule_is_rejected(rule, tmp_path):
    def fit(model, epochs=1):
        callback = tfo.callbacks.BackupAndRestore(
            tmp_path, delete_checkpoint=False
        )
        model.fit(
            *(np.ones((8, 4)), np.ones((8, 3))),
            epochs=epochs,
            verbose=0,
            callbacks=[callback],
        )

    fit(model_of(rule))
    with pytest.raises(ValueError, match="rate_in_momentum=True"):
        fit(model_of(not rule))
    fit(model_of(rule), epochs=2)
