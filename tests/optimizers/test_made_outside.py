"""Optimizers that are created outside of the strategy's scope."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_equal
from cases import with_long
from local import copies

import tf_optimizers as tfo

X = np.random.default_rng(0).random((8, 4)).astype("float32")
Y = X[:, :3]
RATE = keras.optimizers.schedules.CosineDecay(0.1, 6)
MADE = {
    "lamb": lambda: tfo.Lamb(RATE, use_ema=True),
    "lans": lambda: tfo.LANS(0.1, gradient_accumulation_steps=2),
    "adam_offload": lambda: tfo.AdamOffload(RATE, use_ema=True),
    "dgc_momentum": lambda: tfo.DGCMomentum(
        RATE, sparsity=(0.5,), min_compress_size=4
    ),
    "sparse_loco": lambda: tfo.SparseLoCo(
        keras.optimizers.Adam(RATE), 2, sparsity=(0.5,), min_compress_size=4
    ),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        tfo.LANS(0.1), initial_scale=8.0
    ),
}


def make_model(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


def values(strategy, model):
    """Return each replica's values of all variables."""
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return [copies(strategy, v) for v in [*model.weights, *optimizer.variables]]


@pytest.mark.parametrize(
    "name", with_long(list(MADE), set(MADE) - {"loss_scale"})
)
def test_optimizer_made_outside_trains_as_if_made_inside(mirrored, name):
    inside, outside = make_model(mirrored), make_model(mirrored)
    with mirrored.scope():
        inside.compile(MADE[name](), "mse")
    outside.compile(MADE[name](), "mse")
    for model in (inside, outside):
        model.fit(X, Y, batch_size=4, epochs=3, verbose=0, shuffle=False)
    expected, trained = values(mirrored, inside), values(mirrored, outside)
    assert_equal(trained, expected)


@pytest.mark.parametrize("name", ["dgc_momentum", "adam_offload"])
def test_optimizer_made_outside_is_built_by_a_custom_step(mirrored, name):
    weights = []
    for is_inside in (True, False):
        model = make_model(mirrored)
        if is_inside:
            with mirrored.scope():
                optimizer = MADE[name]()
        else:
            optimizer = MADE[name]()

        @tf.function
        def train(optimizer=optimizer, model=model):
            def step():
                rank = tf.distribute.get_replica_context()
                shift = tf.cast(rank.replica_id_in_sync_group, "float32")
                variables = model.trainable_variables
                gradients = [tf.fill(v.shape, 1 + shift) for v in variables]
                optimizer.apply(gradients, variables)

            mirrored.run(step)

        for _ in range(3):
            train()
        assert int(optimizer.iterations.numpy()) == 3
        weights.append(model.get_weights())
    assert_equal(*weights)


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]])
@pytest.mark.parametrize("name", sorted(set(MADE) - {"loss_scale"}))
def test_step_outside_of_run_names_the_remedy(name, devices):
    """TensorFlow's errors are about the scope, or about indices."""
    variables = make_model(tf.distribute.MirroredStrategy(devices)).variables
    gradients = [tf.ones(variable.shape) for variable in variables]
    before = [variable.numpy() for variable in variables]
    with pytest.raises(RuntimeError, match="must run in `strategy.run`"):
        MADE[name]().apply(gradients, variables)
    assert_equal(before, variables)


def test_rate_and_count_that_were_set_before_are_kept(mirrored):
    model = make_model(mirrored)
    optimizer = tfo.Lamb(0.1)
    optimizer.learning_rate = 0.25
    optimizer.iterations.assign(7)
    count = optimizer.iterations
    with mirrored.scope():
        optimizer.build(model.trainable_variables)
    for variable, value in ((count, 7), (optimizer.learning_rate, 0.25)):
        assert copies(mirrored, variable) == [value, value]
