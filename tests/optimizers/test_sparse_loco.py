"""SparseLoCo: reference, limiting cases, conservation and inner optimizers."""

import functools

import dgc
import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from arrays import assert_equal
from cases import error, needs_groups, with_long
from dgc import SHAPES, around, start
from local import copies
from test_replicas import assert_swaps_averages

import tf_optimizers as tfo

NONE = tf.distribute.get_strategy()
RATE = 0.01

# All optimizers, Keras's and ours, that do not wrap another one.
WRAPPERS = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
# Their weights do not depend on the weights that they are given.
ABSOLUTE = ("Ftrl", "ScheduleFreeAdamW")
INNER = {
    name: found
    for name, found in vars(keras.optimizers).items()
    if isinstance(found, type)
    and issubclass(found, keras.optimizers.Optimizer)
    and name not in WRAPPERS + ABSOLUTE
} | {"tfo.Lamb": tfo.Lamb, "tfo.LANS": tfo.LANS}
HOSTED = {"tfo.AdamOffload": tfo.AdamOffload}
# One with slots of other shapes than the variable's, and one of ours.
KINDS = ("Adafactor", "tfo.LANS")

pytestmark = pytest.mark.filterwarnings(
    "ignore:SparseLoCo saves traffic:UserWarning"
)


def movement(weights):
    """Return how far weights are from their initial values."""
    pairs = zip(weights, start().values(), strict=True)
    return [weight - value for weight, value in pairs]


def gradients_of(step, replicas):
    return dgc.make_gradients(step, SHAPES.values(), replicas)


def train(strategy, make, steps=6, eager=False, **kwargs):
    run = dgc.Run(strategy, start(), RATE, make, **kwargs)
    for step in range(steps):
        run.step(gradients_of(step, strategy.num_replicas_in_sync), eager)
    return run


def momentum_sgd(w, g, state, lr):
    return reference.momentum_sgd(w, g, state, lr, 0.9)


ADAMW = functools.partial(keras.optimizers.AdamW, weight_decay=0.1)
SETTINGS = {
    "sgd": (
        functools.partial(keras.optimizers.SGD, momentum=0.9),
        momentum_sgd,
        {"sparsity": (0.75,)},
        {},
    ),
    "adamw": (
        ADAMW,
        functools.partial(reference.adam, weight_decay=0.1),
        {"sparsity": (0.75,)},
        {},
    ),
    "decay, outer rate": (
        ADAMW,
        functools.partial(reference.adam, weight_decay=0.1),
        {
            "sparsity": (0.75,),
            "residual_decay": 0.8,
            "outer_learning_rate": 0.7,
        },
        {"decay": 0.8, "outer_lr": 0.7},
    ),
    "warm-up": (
        keras.optimizers.Adam,
        reference.adam,
        {"sparsity": (0.5, 0.9), "rampup_begin_step": 3, "rampup_step": 4},
        {
            "sparsity": lambda s: (
                None if s < 3 else (0.5, 0.9)[min((s - 3) * 2 // 4, 1)]
            )
        },
    ),
    "there and back": (
        ADAMW,
        functools.partial(reference.adam, weight_decay=0.1),
        {
            "sparsity": (0.5, 0.9),
            "rampup_step": 2,
            "rampdown_begin_step": 4,
            "rampdown_step": 3,
        },
        {
            "sparsity": lambda s: [0.5, 0.9, 0.9, 0.9, 0.5, 0.5, 0.0, None][s],
        },
    ),
    "too small": (
        keras.optimizers.Adam,
        reference.adam,
        {"min_compress_size": 10**6},
        {"compressed": False},
    ),
}


def worst_of_any_step(strategy, settings, steps=8, eager=False, other=None):
    """Return the largest error of weights and residuals."""
    inner, oracle, ours, theirs = settings
    replicas = strategy.num_replicas_in_sync
    run = dgc.Run(strategy, start(), RATE, around(inner), **ours)
    oracles = [
        reference.SparseLoCo(value, replicas, other or oracle, RATE, **theirs)
        for value in start().values()
    ]
    errors = []
    for step in range(steps):
        gradients = gradients_of(step, replicas)
        run.step(gradients, eager)
        for i, each in enumerate(oracles):
            each.step([replica[i].astype("float64") for replica in gradients])
        expected = movement(each.w for each in oracles)
        errors.append(dgc.worst(movement(run.weights()), expected))
        # Variables that are not compressed have none.
        for memory, each in zip(run.memory("residual"), oracles, strict=False):
            errors += [dgc.worst(memory, each.v)] if each.v.any() else []
    return max(errors)


@pytest.mark.parametrize(
    "name", with_long(SETTINGS, ["adamw", "sgd", "warm-up"])
)
def test_two_replicas_match_reference(mirrored, name):
    assert worst_of_any_step(mirrored, SETTINGS[name]) < 1e-4


@pytest.mark.parametrize("name", with_long(["adamw", "warm-up"], ["adamw"]))
def test_eager_matches_reference(mirrored, name):
    assert worst_of_any_step(mirrored, SETTINGS[name], 6, eager=True) < 1e-4


def test_reference_distinguishes_settings(mirrored):
    """Other rules, and rules without their argument, are far off."""
    adamw = SETTINGS["adamw"]
    assert worst_of_any_step(mirrored, adamw, 3, other=reference.adam) > 1e-2
    decayed = SETTINGS["decay, outer rate"]
    assert worst_of_any_step(mirrored, (*decayed[:3], {}), 3) > 1e-2


def test_without_sparsity_sgd_is_that_of_the_global_batch(mirrored):
    run = train(mirrored, around(keras.optimizers.SGD), sparsity=(0.0,))
    expected = list(start().values())
    for step in range(6):
        for replica in gradients_of(step, 2):
            pairs = zip(expected, replica, strict=True)
            expected = [w - RATE * g for w, g in pairs]
    assert error(run.weights(), expected) < 1e-6


@pytest.mark.parametrize(
    "name", with_long(INNER | HOSTED, set(INNER) - set(KINDS))
)
def test_one_replica_without_sparsity_is_the_inner_optimizer(name):
    inner = (INNER | HOSTED)[name]
    variables = [keras.Variable(v, name=n) for n, v in start().items()]
    alone = inner(RATE)
    for step in range(6):
        alone.apply(gradients_of(step, 1)[0], variables)
    run = train(NONE, around(inner), sparsity=(0.0,))
    expected = movement(variable.numpy() for variable in variables)
    assert dgc.worst(movement(run.weights()), expected) < 1e-4
    for ours, theirs in zip(
        run.optimizer.inner_optimizer.variables, alone.variables, strict=True
    ):
        if ours.dtype.startswith("float"):
            np.testing.assert_allclose(
                ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-7
            )


@pytest.mark.parametrize("name", with_long(INNER, set(INNER) - set(KINDS)))
def test_replicas_have_separate_states_and_equal_weights(mirrored, name):
    run = train(mirrored, around(INNER[name]), sparsity=(0.5,))
    for variable, before in zip(run.variables, start().values(), strict=True):
        first, second = copies(mirrored, variable)
        np.testing.assert_array_equal(first, second)
        assert np.abs(first - before).max() > 1e-5
    for first, second in run.memory("residual"):
        assert not np.array_equal(first, second)
    state = run.optimizer.inner_optimizer.variables
    apart = [v for v in state if tf.TensorShape(v.shape).num_elements() > 1]
    for variable in apart:
        first, second = copies(mirrored, variable)
        assert not np.array_equal(first, second), variable.path
        np.testing.assert_allclose(
            variable.numpy(), (first + second) / 2, rtol=1e-6, atol=1e-9
        )
    equal = [v for v in state if not any(v is other for other in apart)]
    for variable in equal:
        first, second = copies(mirrored, variable)
        np.testing.assert_array_equal(first, second)
    assert run.optimizer.iterations.numpy() == 6
    assert run.optimizer.inner_optimizer.iterations.numpy() == 6


@needs_groups
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_several_inner_optimizers_step_as_if_alone(mirrored):
    def make(rate):
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                keras.optimizers.Adam(rate),
                {"kernel": keras.optimizers.SGD(rate)},
            )
        )

    run = train(NONE, around(make), sparsity=(0.0,))
    adam = train(NONE, around(keras.optimizers.Adam), sparsity=(0.0,))
    sgd = train(NONE, around(keras.optimizers.SGD), sparsity=(0.0,))
    expected = [sgd.weights()[0], *adam.weights()[1:]]
    assert_equal(run.weights(), expected)
    trained = train(mirrored, around(make))
    # Layers may be frozen, or all variables of one optimizer.
    for places in ([0, 2], [1, 2]):
        before = trained.weights()
        used = [trained.variables[i] for i in places]
        ones = [tf.ones(v.shape) for v in used]
        mirrored.run(trained.optimizer.apply, (ones, used))
        pairs = enumerate(zip(trained.weights(), before, strict=True))
        assert places == [i for i, (new, old) in pairs if np.any(new != old)]


class Halving(keras.optimizers.Optimizer):
    """Wraps an optimizer, and halves its gradients."""

    def __init__(self, inner_optimizer):
        super().__init__(0.0)
        self.inner_optimizer = inner_optimizer

    def build(self, variables):
        super().build(variables)
        self.inner_optimizer.build(variables)

    def apply(self, grads, trainable_variables=None):
        halves = [gradient / 2 for gradient in grads]
        self.inner_optimizer.apply(halves, trainable_variables)


def test_wrapper_of_the_user_is_stepped_itself(mirrored):
    def train(wrap, rate):
        with mirrored.scope():
            weight = keras.Variable(np.ones(4), dtype="float32")
            inner = wrap(keras.optimizers.SGD(rate, momentum=0.9))
            optimizer = tfo.SparseLoCo(inner)
        for _ in range(2):
            mirrored.run(optimizer.apply, ([tf.ones([4])], [weight]))
        return weight.numpy()

    expected = train(lambda inner: inner, 0.05)
    np.testing.assert_allclose(train(Halving, 0.1), expected, rtol=1e-6)


@pytest.mark.parametrize("sync_every", [1, 2])
def test_small_variable_may_have_two_gradients(sync_every):
    """This happens if two losses share an encoder."""
    weight, alone = (keras.Variable(np.ones(4), dtype="float32") for _ in "ab")
    inner = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
    loco, plain = tfo.SparseLoCo(inner(), sync_every=sync_every), inner()
    gradients = [tf.fill([4], 1.0), tf.fill([4], 3.0)]
    for _ in range(2):
        loco.apply(gradients, [weight, weight])
        plain.apply(gradients, [alone, alone])
    np.testing.assert_allclose(weight, alone, rtol=1e-6)


def test_training_nothing_is_no_error():
    """Keras's optimizers also accept a frozen model."""
    optimizer = around(INNER["Adam"])(RATE)
    optimizer.build([])
    assert optimizer.built


@pytest.mark.parametrize("inner", ["SGD", "AdamW"])
def test_embedding_touched_by_one_replica_moves_by_half(mirrored, inner):
    """The embedding is large enough for compression, but not compressed."""
    values = {"table": np.ones((50, 4), "float32")}
    run = dgc.Run(mirrored, values, RATE, around(INNER[inner]))
    table, alone = run.variables[0], keras.Variable(values["table"])
    rows = [[1, 3, 3], [1, 2, 7]]

    def slices(replica, scale):
        gradients = np.arange(12, dtype="float32").reshape(3, 4) + replica
        indices = tf.constant(rows[replica])
        return tf.IndexedSlices(scale * gradients, indices, [50, 4])

    own = [slices(replica, 0.5) for replica in range(2)]
    dgc.apply_own(mirrored, run.optimizer, table, own)
    means = []
    for own in range(2):
        alone.assign(values["table"])
        INNER[inner](RATE).apply(
            [tf.convert_to_tensor(slices(own, 1.0))], [alone]
        )
        means.append(alone.numpy())
    assert error([table], [sum(means) / 2]) < 1e-6
    assert not any(part.any() for part in run.memory("residual")[0])
    summary = run.optimizer.communication_summary()["total"]
    assert summary["sent_bytes"] == summary["dense_bytes"] == 800


def test_state_of_master_weights_has_the_names_of_variables(mirrored):
    half = dict.fromkeys(SHAPES, "float16")
    run = dgc.Run(mirrored, start(), make=around(tfo.Lamb), dtypes=half)
    state = run.optimizer.inner_optimizer.variables[-6:]
    names = [variable.path.split("/")[-1] for variable in state]
    assert [name.split("_")[0] for name in names[::2]] == [*SHAPES]


def test_clipping_is_that_of_each_replica(mirrored):
    def inner(rate):
        return keras.optimizers.SGD(rate, clipnorm=0.1)

    run = train(mirrored, around(inner), steps=1, sparsity=(0.0,))
    for i, (weight, before) in enumerate(
        zip(run.weights(), start().values(), strict=True)
    ):
        expected = before - RATE * sum(
            reference.clip_by_norm(2 * replica[i], 0.1) / 2
            for replica in gradients_of(0, 2)
        )
        assert error([weight], [expected]) < 1e-6
        assert error([weight - before], [expected - before]) < 1e-2


@pytest.mark.parametrize("kind", [keras.Variable, tf.Variable])
def test_constraint_holds_for_the_weights_of_all(mirrored, kind):
    """The constraint does not apply to movements, which are averaged."""
    constraint = keras.constraints.NonNeg()
    with mirrored.scope():
        if kind is tf.Variable:
            variable = tf.Variable([0.5, 0.5], constraint=constraint)
        else:
            variable = keras.Variable([0.5, 0.5])
            variable.constraint = constraint
        optimizer = tfo.SparseLoCo(keras.optimizers.SGD(1.0))
        optimizer.build([variable])
    gradients = tf.constant([[1.5, 0.0], [-1.0, 0.25]])
    dgc.apply_own(mirrored, optimizer, variable, gradients)
    np.testing.assert_array_equal(variable, [0.0, 0.25])
    assert variable.constraint is constraint


def test_keras_callback_swaps_weights_and_averages(mirrored):
    """The callback looks for averages on the inner optimizer."""
    assert_swaps_averages(
        mirrored,
        lambda **kwargs: tfo.SparseLoCo(keras.optimizers.Adam(0.1), **kwargs),
    )


def test_count_of_updates_can_be_assigned():
    """This continues a run whose state was not saved."""
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.0)
    optimizer = tfo.SparseLoCo(keras.optimizers.SGD(schedule))
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    optimizer.iterations.assign(5)
    optimizer.apply([tf.ones([1])])
    np.testing.assert_array_equal(variable, [0.5])
    assert float(optimizer.learning_rate) == float(schedule(6))


def test_weights_of_the_inner_optimizer_are_set():
    def make():
        optimizer = tfo.SparseLoCo(keras.optimizers.Adam())
        optimizer.build([keras.Variable([1.0])])
        return optimizer

    first, second = make(), make()
    first.apply([tf.ones([1])])
    weights = [variable.numpy() for variable in first.variables]
    second.set_weights(weights)
    assert_equal(second.variables, weights)


def test_rate_of_the_inner_optimizer_is_read_and_set():
    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 10)
    optimizer = tfo.SparseLoCo(keras.optimizers.Adam(schedule))
    variable = keras.Variable([1.0])
    for step in range(3):
        assert float(optimizer.learning_rate) == float(schedule(step))
        optimizer.apply([tf.ones([1])], [variable])
    optimizer = tfo.SparseLoCo(keras.optimizers.SGD(0.5))
    optimizer.learning_rate = 0.25
    optimizer.apply([tf.ones([1])], [variable := keras.Variable([1.0])])
    np.testing.assert_array_equal(variable, [0.75])


def test_exclusions_reach_the_inner_optimizer():
    optimizer = tfo.SparseLoCo(keras.optimizers.SGD(1.0, weight_decay=0.5))
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    kernel = keras.Variable([1.0], name="kernel")
    bias = keras.Variable([1.0], name="bias")
    optimizer.apply([tf.zeros([1])] * 2, [kernel, bias])
    assert (float(kernel[0]), float(bias[0])) == (0.5, 1.0)


@pytest.mark.parametrize("name", ABSOLUTE)
def test_optimizer_that_does_not_step_is_rejected(name):
    if not hasattr(keras.optimizers, name):
        pytest.skip(f"Keras has no {name} yet")
    with pytest.raises(ValueError, match="must update the current"):
        tfo.SparseLoCo(getattr(keras.optimizers, name)(RATE))
    subclass = type("Own", (getattr(keras.optimizers, name),), {})
    with pytest.raises(ValueError, match="Received: `Own`"):
        tfo.SparseLoCo(subclass(RATE))


def test_half_precision_of_tensorflow_s_variables():
    optimizer = tfo.SparseLoCo(keras.optimizers.SGD(0.5))
    variable = tf.Variable([1.0], dtype="bfloat16")
    optimizer.apply([tf.ones([1], "bfloat16")], [variable])
    np.testing.assert_array_equal(tf.cast(variable, tf.float32), [0.5])


def test_optimizer_of_another_strategy_is_rejected(mirrored):
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        inner = keras.optimizers.SGD()
    with mirrored.scope():
        optimizer = tfo.SparseLoCo(inner)
        variable = keras.Variable([1.0])
        with pytest.raises(ValueError, match="Create both in"):
            optimizer.build([variable])
    assert not optimizer.built


def test_state_on_the_host_is_rejected_if_replicas_share_it(mirrored):
    with pytest.raises(ValueError, match="one replica per process"):
        train(mirrored, around(tfo.AdamOffload))


def test_xla_is_rejected_before_anything_changes():
    run = dgc.Run(NONE, start(), RATE, around(keras.optimizers.Adam))
    ones = [tf.ones(shape) for shape in SHAPES.values()]

    @tf.function(jit_compile=True)
    def step():
        run.optimizer.apply(ones, run.variables)

    with pytest.raises(RuntimeError, match="`SparseLoCo` cannot run under XLA"):
        step()
    assert_equal(run.weights(), start().values())
    assert run.optimizer.inner_optimizer.iterations.numpy() == 0


def test_one_replica_is_warned():
    run = dgc.Run(NONE, start(), RATE, around(keras.optimizers.SGD))
    with pytest.warns(UserWarning, match="Received: one replica"):
        run.step(gradients_of(0, 1))


def test_communication_summary_is_that_of_the_entries(mirrored):
    arguments = {"sparsity": (0.9,), "min_compress_size": 20}
    ours = dgc.Run(
        mirrored, start(), RATE, around(keras.optimizers.Adam), **arguments
    )
    theirs = dgc.Run(mirrored, start(), RATE, **arguments)
    expected = theirs.optimizer.communication_summary(3)
    found = ours.optimizer.communication_summary(3)
    assert found["total"] == expected["total"]
    assert found["total"]["sent_bytes"] < found["total"]["dense_bytes"] / 3
    assert found["sparsity"] == 0.9


def make_model(optimizer):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(32), keras.layers.Dense(3)]
    )
    model.compile(optimizer, "mse")
    return model


X, Y = np.random.default_rng(0).random((2, 32, 4)).astype("float32")


FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}


def with_averages(inner, **settings):
    """Return a model whose `SparseLoCo` averages the weights."""
    return make_model(
        tfo.SparseLoCo(
            (INNER | HOSTED)[inner](0.01),
            sparsity=(0.8,),
            min_compress_size=16,
            use_ema=True,
            **settings,
        )
    )


@pytest.mark.parametrize("inner", ["AdamW", "tfo.AdamOffload"])
def test_averages_are_swapped_into_the_weights(inner):
    model = with_averages(inner, ema_momentum=0.5)
    weights, seen = [], []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights.append(self.model.get_weights())

        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.get_weights())

    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    model.fit(X, Y[:, :3], callbacks=[swap, Note()], **FIT)
    averages = weights[0]
    for each in weights[1:]:
        averages = [(a + w) / 2 for a, w in zip(averages, each, strict=True)]
    for found, average, last in zip(*seen, averages, weights[-1], strict=True):
        np.testing.assert_allclose(found, average, atol=1e-6)
        assert np.abs(average - last).max() > 1e-3


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "inner", with_long(["AdamW", "tfo.LANS"], ["tfo.LANS"])
)
def test_saved_model_continues_bitwise_equal(tmp_path, inner):
    model = with_averages(inner)
    model.fit(X, Y[:, :3], **FIT)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    (residual,) = [
        v for v in loaded.optimizer.variables if v.path.endswith("l_residual")
    ][:1]
    assert np.any(residual.numpy())
    for each in (model, loaded):
        each.fit(X, Y[:, :3], **FIT)
    assert_equal(
        [*model.weights, *model.optimizer.variables],
        [*loaded.weights, *loaded.optimizer.variables],
    )


def test_monitor_shows_the_residual(mirrored):
    with mirrored.scope():
        optimizer = tfo.SparseLoCo(
            keras.optimizers.Adam(0.01), sparsity=(0.8,), min_compress_size=16
        )
        model = make_model(optimizer)
    history = model.fit(
        *(X, Y[:, :3]),
        batch_size=8,
        verbose=0,
        callbacks=[tfo.callbacks.CompressionMonitor(every=2)],
    ).history
    assert history["sparsity"] == [0.8]
    assert history["residual_norm"][0] > 1e-3
    assert 0.5 < history["residual_age"][0] < 10
    summary = optimizer.communication_summary()
    assert history["sent_bytes"] == [summary["total"]["sent_bytes"]]


def built():
    optimizer = keras.optimizers.SGD()
    optimizer.build([keras.Variable([1.0])])
    return optimizer


SGD = keras.optimizers.SGD
SCALED = keras.optimizers.LossScaleOptimizer
BAD_INNER = {
    "name": (lambda: "adam", TypeError, "a Keras optimizer"),
    "class": (lambda: SGD, TypeError, "a Keras optimizer"),
    "dgc": (lambda: tfo.DGCMomentum(0.1), ValueError, "exchanges val"),
    "itself": (lambda: tfo.SparseLoCo(SGD()), ValueError, "exchanges val"),
    "scaled": (lambda: SCALED(SGD()), ValueError, "Wrap `SparseLoCo`"),
    "built": (built, ValueError, "must be new"),
    "ema": (lambda: SGD(use_ema=True), ValueError, "not set `use_ema`"),
    "scale": (
        lambda: SGD(loss_scale_factor=2.0),
        ValueError,
        "not set `loss_scale_factor`",
    ),
    "accumulation": (
        lambda: SGD(gradient_accumulation_steps=2),
        ValueError,
        "not set `gradient_accumulation_steps`",
    ),
}


@pytest.mark.parametrize(
    ("make", "kind", "message"), BAD_INNER.values(), ids=BAD_INNER.keys()
)
def test_optimizer_that_cannot_be_inside_is_rejected(make, kind, message):
    with pytest.raises(kind, match=message) as caught:
        tfo.SparseLoCo(make())
    assert str(caught.value).startswith("`inner_optimizer` must")
    assert "Received: " in str(caught.value)


@needs_groups
def test_each_of_several_inside_is_checked():
    groups = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(SGD(), {"a": tfo.DGCMomentum(0.1)})
    )
    with pytest.raises(ValueError, match="exchanges val"):
        tfo.SparseLoCo(groups)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"sync_every": 0}, ValueError, "`sync_every` must be an integer"),
        ({"sync_every": 1.0}, TypeError, "`sync_every` must be an integer"),
        ({"overlap": True}, ValueError, "Pass a larger `sync_every`"),
        ({"overlap": 1, "sync_every": 2}, TypeError, "`overlap` must"),
        (
            {"use_ema": True, "sync_every": 2},
            ValueError,
            "`use_ema` needs the same weights",
        ),
        (
            {"step_ahead": 0.5},
            ValueError,
            "Received: step_ahead=0.5, sync_every=1, overlap=False",
        ),
        (
            {"step_ahead": 0.5, "sync_every": 2, "overlap": True},
            ValueError,
            "and no `overlap`",
        ),
        ({"step_ahead": 1.5}, ValueError, "`step_ahead` must be"),
        ({"sparsity": 0.9}, TypeError, "`sparsity` must be a sequence"),
        ({"rampup_step": 0}, ValueError, "`rampup_step` must be"),
        ({"residual_decay": 1.1}, ValueError, "`residual_decay` must be"),
        ({"residual_decay": "1"}, TypeError, "`residual_decay` must be"),
        ({"outer_learning_rate": 0}, ValueError, "`outer_learning_rate` must"),
        ({"min_compress_size": 0}, ValueError, "`min_compress_size` must be"),
        ({"value_dtype": "int8"}, ValueError, "`value_dtype` must be one of"),
        ({"clipnorm": 1.0}, ValueError, "support `clipnorm`"),
        ({"weight_decay": 0.1}, ValueError, "support `weight_decay`"),
        ({"learning_rate": 0.1}, ValueError, "support `learning_rate`"),
        ({"ema_momentum": 2}, ValueError, "`ema_momentum` must be"),
        ({"momentum": 0.9}, ValueError, "not recognized"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_argument_is_rejected(arguments, kind, message):
    with pytest.raises(kind, match=message):
        tfo.SparseLoCo(SGD(), **arguments)
