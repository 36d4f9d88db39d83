"""Two replicas on logical CPUs equal one replica on the same batch."""

import contextlib
import functools
import inspect

import cases
import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from arrays import assert_equal
from local import assert_copies_agree, copies, per_replica

import tf_optimizers as tfo
from tf_optimizers._compat import hooks

# test_offload_placement.py also tests AdamOffload on several replicas.
pytestmark = cases.each_kind("lans", "adam_offload")

# For float32 sums of two replicas' gradients, over some steps of 2e-2.
TOLERANCE = 2e-6

ROWS = np.random.default_rng(0).integers(0, 10, (16, 4))
TARGETS = np.random.default_rng(1).random((16, 3), "float32")


def make_model(dtype="float32"):
    """Return a model with an embedding, whose gradients are sparse."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(10, 5, dtype=dtype),
            keras.layers.Flatten(dtype=dtype),
            keras.layers.Dense(3, dtype=dtype),
        ]
    )


def fit(make_optimizer, dtype="float32"):
    """Train without XLA, as replicas do, since XLA rounds differently."""
    model = make_model(dtype)
    model.compile(make_optimizer(), "mse", jit_compile=False)
    model.fit(ROWS, TARGETS, batch_size=8, epochs=4, verbose=0, shuffle=False)
    return model


def assert_replicas_agree(strategy, model):
    for variable in [*model.weights, *model.optimizer.variables]:
        if "gradient_accumulator" in variable.path:
            continue  # These differ between replicas by design.
        if len(copies(strategy, variable)) == 1:
            # There is one for all replicas, on the host.
            assert variable.path.startswith("adam_offload")
        assert_copies_agree(strategy, [variable])


def assert_two_replicas_equal_one(strategy, make_optimizer):
    with tf.device(strategy.extended.worker_devices[0]):
        expected = fit(make_optimizer)
    with strategy.scope():
        model = fit(make_optimizer)
    assert_replicas_agree(strategy, model)
    for start, weight in zip(
        make_model().get_weights(), model.get_weights(), strict=True
    ):
        assert np.abs(weight - start).max() > 3e-4
    error = cases.error(model.get_weights(), expected.get_weights())
    assert error < TOLERANCE


@pytest.mark.parametrize("name", ["mirrored", "none"])
def test_keras_callback_swaps_weights_and_averages(case, mirrored, name):
    strategy = mirrored if name == "mirrored" else tf.distribute.get_strategy()
    is_on_host = case.optimizer is tfo.AdamOffload and name == "mirrored"
    error = pytest.raises(ValueError, match="cannot swap averages of `AdamO")
    with error if is_on_host else contextlib.nullcontext():
        assert_swaps_averages(strategy, functools.partial(case.make, 0.1))


def test_fit_raises_before_its_first_step_if_averages_cannot_be_swapped(
    case, mirrored
):
    if case.optimizer is not tfo.AdamOffload:
        pytest.skip("Only `AdamOffload` has averages on the host.")
    batches = []
    callbacks = [
        keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: batches.append(batch)
        ),
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    ]
    with mirrored.scope():
        model = make_model()
        model.compile(case.make(use_ema=True), "mse")
    with pytest.raises(ValueError, match="cannot swap averages of `AdamO"):
        model.fit(ROWS, TARGETS, verbose=0, callbacks=callbacks)
    assert batches == []
    model.fit(ROWS, TARGETS, verbose=0)


def assert_swaps_averages(strategy, make):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.compile(make(use_ema=True, ema_momentum=0.5), "mse")
    variables, optimizer = model.trainable_variables, model.optimizer
    gradients = [tf.ones(variable.shape) for variable in variables]
    for _ in range(2):
        strategy.run(optimizer.apply, (gradients, variables))
    weights = model.get_weights()
    optimizer.finalize_variable_values(variables)
    averages = model.get_weights()
    assert cases.error(averages, weights) > 1e-3
    model.set_weights(weights)
    callback = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    callback.set_model(model)
    callback.set_params({"epochs": 1})
    for _ in range(2):
        callback.on_test_begin()
        assert cases.error(model.get_weights(), averages) < TOLERANCE
        callback.on_test_end()
        assert cases.error(model.get_weights(), weights) < TOLERANCE
    callback.on_epoch_end(0)
    optimizer.finalize_variable_values(variables)
    assert cases.error(model.get_weights(), averages) < TOLERANCE


AVERAGED = {"use_ema": True, "ema_overwrite_frequency": 3}
# Each setting is in a combination; `tox` tries most of them.
SOME = {"clipnorm": 0.01, "loss_scale_factor": 128.0}
OTHERS = {"clipvalue": 0.001} | AVERAGED
MOST = AVERAGED | {
    "gradient_accumulation_steps": 2,
    "global_clipnorm": 0.01,
    "loss_scale_factor": 8.0,
}


@pytest.mark.parametrize(
    "kwargs",
    cases.with_long([MOST, SOME, OTHERS], [SOME, OTHERS]),
    ids="-".join,
)
def test_two_replicas_equal_one(case, mirrored, kwargs):
    assert_two_replicas_equal_one(mirrored, lambda: case.make(**kwargs))


@pytest.fixture
def before_any_patch():
    """Undo, for a test, what others have replaced in `LossScaleOptimizer`."""
    kind = keras.optimizers.LossScaleOptimizer
    before, original = kind._tf_apply, inspect.unwrap(kind._tf_apply)
    kind._tf_apply = original
    hooks._replace_scaled_step.cache_clear()
    yield
    if before is not original:
        kind._tf_apply = before


def test_replicas_skip_an_overflow_together(case, mirrored, before_any_patch):
    """The second replica overflows in the first step; Keras asks the first."""

    gradient = per_replica(
        mirrored, lambda rank: tf.constant([2.0**15, [1.0, np.inf][rank]])
    )
    with mirrored.scope():
        variable = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.LossScaleOptimizer(case.make())
    mirrored.run(optimizer.apply, ([gradient], [variable]))
    np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])
    assert copies(mirrored, optimizer.dynamic_scale) == 2 * [2.0**14]
    mirrored.run(optimizer.apply, ([tf.ones(2)], [variable]))
    assert np.isfinite(variable.numpy()).all()
    assert np.abs(variable.numpy() - [1.0, 2.0]).min() > 1e-3


def test_loss_scaling_of_other_strategies_is_unchanged(
    case, mirrored, monkeypatch
):
    def scaled(strategy, optimizer):
        with strategy.scope():
            variable = keras.Variable([1.0, 2.0])
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        return functools.partial(
            strategy.run, optimizer.apply, ([tf.ones(2)], [variable])
        )

    scaled(mirrored, case.make())()
    monkeypatch.setattr(hooks, "_apply_together", None)
    # TensorFlow would mix up the collectives of two of its strategies.
    exchange = tf.distribute.ReductionToOneDevice()
    other = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=exchange
    )
    scaled(other, keras.optimizers.SGD())()
    with pytest.raises(TypeError, match="not callable"):
        scaled(mirrored, keras.optimizers.SGD())()


@pytest.mark.long
@cases.needs_groups
def test_two_replicas_equal_one_with_groups(case, mirrored):
    def make():
        by_path = {".*kernel": case.make(0.05, clipnorm=0.01)}
        groups = keras.optimizers.OptimizerMap(case.make(), by_path)
        return keras.optimizers.MultiOptimizer(groups)

    assert_two_replicas_equal_one(mirrored, make)


@pytest.mark.parametrize(
    "dtype", cases.with_long(["float16", "bfloat16"], ["float16"])
)
def test_replicas_agree_in_half_precision(case, mirrored, dtype):
    with mirrored.scope():
        model = fit(case.make, dtype)
    assert_replicas_agree(mirrored, model)
    # Replicas round the loss and its gradient separately.
    error = cases.error(
        map(cases.as_numpy, model.weights),
        map(cases.as_numpy, fit(case.make, dtype).weights),
    )
    assert error < 0.05


def test_clipping_follows_the_sum_over_replicas(case, mirrored):
    """Keras clips first, but norms of halves are not the norm of the whole."""
    local = [cases.make_gradients(0), [10 * g for g in cases.make_gradients(1)]]
    gradients = [
        per_replica(mirrored, lambda rank, i=i: tf.constant(local[rank][i]))
        for i in range(2)
    ]
    with mirrored.scope():
        variables = cases.make_variables()
        optimizer = case.make(clipnorm=1.0)
        optimizer.build(variables)
    mirrored.run(optimizer.apply, (gradients, variables))

    def control(first, second, **kwargs):
        sums = [a + b for a, b in zip(first, second, strict=True)]
        return cases.run(
            case.make(**kwargs),
            cases.make_variables(),
            1,
            gradients=lambda _: sums,
        )

    expected = control(*local, clipnorm=1.0)
    assert cases.error(variables, expected) < TOLERANCE
    clipped = [[reference.clip_by_norm(g, 1.0) for g in gs] for gs in local]
    assert cases.error(variables, control(*clipped)) > 1e-3


def test_custom_loop_builds_the_optimizer_in_its_first_step(case, mirrored):
    with mirrored.scope():
        variables = cases.make_variables()
        optimizer = case.make()

    @tf.function
    def step(gradients):
        def run(gradients):
            # Half a gradient each: replicas' gradients are summed.
            optimizer.apply([g / 2 for g in gradients], variables)

        mirrored.run(run, (gradients,))

    for i in range(3):
        step([tf.constant(g) for g in cases.make_gradients(i)])
    expected = cases.run_reference(case.reference_step(), 3)
    assert cases.error(variables, expected) < TOLERANCE


def test_subclass_may_override_methods_of_keras(case, mirrored):
    """`update_step` takes three arguments, and may call ours."""

    class Faster(case.optimizer):
        def update_step(self, gradient, variable, learning_rate):
            return super().update_step(gradient, variable, 2 * learning_rate)

    def stepped(optimizer):
        with mirrored.scope():
            variables = cases.make_variables()
            optimizer.build(variables)
        gradients = [tf.constant(g / 2) for g in cases.make_gradients(0)]
        apply = optimizer.apply
        tf.function(lambda: mirrored.run(apply, (gradients, variables)))()
        return variables

    faster = stepped(Faster(0.02, **case.arguments))
    assert cases.error(faster, stepped(case.make(0.04))) == 0
    assert cases.error(faster, stepped(case.make(0.02))) > 1e-3


def test_copy_made_in_the_scope_trains_on_its_own(case, mirrored):
    with mirrored.scope():
        variables = cases.make_variables()
        optimizer = case.make()
        optimizer.build(cases.make_variables())
        copy = case.optimizer.from_config(optimizer.get_config())
        copy.build(variables)
    # Half a gradient each: replicas' gradients are summed.
    gradients = [tf.constant(g / 2) for g in cases.make_gradients(0)]
    mirrored.run(copy.apply, (gradients, variables))
    expected = cases.run_reference(case.reference_step(), 1)
    assert cases.error(variables, expected) < TOLERANCE


def test_replicas_exclude_the_same_variables(case, mirrored):
    values = {"kernel": np.ones(2), "bias": np.ones(2)}
    zeros = [tf.zeros(2), tf.zeros(2)]
    with mirrored.scope():
        variables = [keras.Variable(v, name=n) for n, v in values.items()]
        optimizer = case.make()

    def step(names, kept):
        optimizer.exclude_from_weight_decay(kept, names)
        optimizer.apply(zeros, variables)

    for _ in range(2):
        mirrored.run(step, (["bias"], variables[1:]))
    assert np.abs(variables[0] - 1).min() > 1e-3
    np.testing.assert_array_equal(variables[1], values["bias"])
    for other in [(["kernel"], variables[1:]), (["bias"], variables)]:
        with pytest.raises(RuntimeError, match="before the optimizer is built"):
            mirrored.run(step, other)


def test_apply_outside_of_a_replica_is_rejected(case, mirrored):
    with mirrored.scope():
        variables = cases.make_variables()
        optimizer = case.make()
        with pytest.raises(RuntimeError, match="must run in `strategy.run`"):
            optimizer.apply(cases.make_gradients(0), variables)
    before = [variable.numpy() for variable in variables]
    for _ in ("not built", "built"):
        with pytest.raises(RuntimeError, match="must run in `strategy.run`"):
            optimizer.apply(cases.make_gradients(0), variables)
        with mirrored.scope():
            optimizer.build(variables)
    assert_equal(before, variables)


@pytest.mark.long
def test_one_device_strategy_equals_none(case):
    strategy = tf.distribute.OneDeviceStrategy("CPU:1")
    with strategy.scope():
        model = fit(case.make)
    assert all("CPU:1" in w.value.device for w in model.weights)
    with tf.device("CPU:0"):
        expected = fit(case.make)
    assert_equal(model.get_weights(), expected.get_weights())
