"""SparseLoCo with several local steps per exchange."""

import contextlib
import warnings

import dgc
import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from arrays import assert_equal
from cases import error, with_long
from dgc import around, start
from local import copies
from test_sparse_loco import (
    INNER,
    NONE,
    RATE,
    SETTINGS,
    gradients_of,
    movement,
    train,
)

import tf_optimizers as tfo
from tf_optimizers.replicas import replicas_of
from tf_optimizers.wrapped import current_round

EVERY = 4
X = np.random.default_rng(0).random((48, 6)).astype("float32")
Y = X[:, :3] ** 2

pytestmark = [
    pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic:UserWarning"),
]


class Rounds:
    """A run of rounds, and a reference per variable."""

    def __init__(self, strategy, settings, **kwargs):
        inner, oracle, ours, theirs = settings
        self.strategy = strategy
        self.replicas = strategy.num_replicas_in_sync
        rounds = {"sync_every": EVERY} | kwargs
        self.run = dgc.Run(
            strategy, start(), RATE, around(inner), **ours | rounds
        )
        self.oracles = [
            reference.SparseLoCo(
                *(value, self.replicas, oracle, RATE),
                every=rounds["sync_every"],
                overlap=rounds.get("overlap", False),
                ahead=rounds.get("step_ahead", 0.0),
                **theirs,
            )
            for value in start().values()
        ]
        self.steps = 0

    def step(self, eager=False):
        gradients = gradients_of(self.steps, self.replicas)
        self.steps += 1
        self.run.step(gradients, eager)
        for i, oracle in enumerate(self.oracles):
            oracle.step([own[i].astype("float64") for own in gradients])

    def synchronize(self):
        self.run.optimizer.synchronize()
        for oracle in self.oracles:
            if oracle.taken:
                oracle.synchronize()

    def local(self):
        """Return the weights of each replica."""
        parts = [copies(self.strategy, v) for v in self.run.variables]
        return list(zip(*parts, strict=True))

    def error(self):
        """Return the largest errors of replicas' weights, and of residuals."""
        errors = [
            dgc.worst(
                movement(own), movement(each.local[i] for each in self.oracles)
            )
            for i, own in enumerate(self.local())
        ]
        # Variables that are not compressed have none.
        memory = self.run.memory("residual")
        for parts, each in zip(memory, self.oracles, strict=False):
            errors += [dgc.worst(parts, each.v)] if each.v.any() else []
        return max(errors)


@pytest.mark.parametrize(
    "name",
    with_long(
        [name for name in SETTINGS if name != "there and back"],
        # Rounds that end early are tested with AdamW.
        ["adamw", "decay, outer rate", "sgd"],
    ),
)
def test_two_replicas_match_reference(mirrored, name):
    rounds = Rounds(mirrored, SETTINGS[name])
    for step in range(1, 14):
        rounds.step()
        assert rounds.error() < 1e-4, step
        first, second = rounds.local()
        assert (error(first, second) > 1e-3) == (step % EVERY > 0)
        assert rounds.run.optimizer.is_synchronized == (step % EVERY == 0)
        if step % EVERY == 0:
            assert_equal(first, second)


def test_eager_matches_reference(mirrored):
    rounds = Rounds(mirrored, SETTINGS["adamw"], sync_every=2)
    for _ in range(5):
        rounds.step(eager=True)
        assert rounds.error() < 1e-4


def test_rounds_step_ahead(mirrored):
    """Rounds begin from weights that contain a part of unsent updates."""
    rounds = Rounds(mirrored, SETTINGS["adamw"], step_ahead=0.75)
    optimizer = rounds.run.optimizer
    for step in range(1, 12):
        rounds.step()
        if step in (5, 7, 11):
            ahead = [each.base[0] - each.w for each in rounds.oracles]
            assert max(np.abs(each).max() for each in ahead) > 1e-3
        if step == 6:
            rounds.synchronize()  # The next round steps ahead, too.
        assert rounds.error() < 1e-4, step
        assert optimizer.is_synchronized == (step in (4, 6, 10))


@pytest.mark.parametrize("taken", with_long([1, 2, 3, 4], [2, 3, 4]))
def test_a_round_may_end_early(mirrored, taken):
    """Residuals stay, and the next round has its full number of steps."""
    rounds = Rounds(mirrored, SETTINGS["adamw"])
    for step in range(1, 12):
        rounds.step()
        if step == EVERY + taken:
            rounds.synchronize()
            # A second call changes nothing.
            before = rounds.local()
            rounds.run.optimizer.synchronize()
            np.testing.assert_equal(rounds.local(), before)
            assert error(*before) == 0.0
        assert rounds.error() < 1e-4, step
    for parts in rounds.run.memory("residual"):
        assert np.abs(parts).max() > 1e-5


def test_all_is_sent_before_the_first_traced_step(mirrored):
    """A checkpoint is restored in the middle of a round."""

    def parts(run):
        variables = [*run.variables, *run.optimizer.variables]
        local = mirrored.experimental_local_results
        return [part for v in variables for part in local(v.value)]

    settings = {"sync_every": EVERY, "sparsity": (0.9,)}
    source = train(mirrored, around(INNER["SGD"]), EVERY + 2, **settings)
    run = train(mirrored, around(INNER["SGD"]), steps=0, **settings)
    with mirrored.scope():
        run.optimizer.build(run.variables)
    for part, value in zip(parts(run), parts(source), strict=True):
        part.assign(value)
    means = [np.mean(copies(mirrored, v), axis=0) for v in run.variables]
    held = run.memory("residual")
    run.optimizer.synchronize()
    for variable, mean in zip(run.variables, means, strict=True):
        for copy in copies(mirrored, variable):
            np.testing.assert_allclose(copy, mean, atol=1e-6)
    assert max(np.abs(v).max() for v in held) > 1e-3
    np.testing.assert_equal(run.memory("residual"), held)


def test_one_replica_makes_local_steps(mirrored):
    rounds = Rounds(NONE, SETTINGS["adamw"])
    for _ in range(10):
        rounds.step()
        assert rounds.error() < 1e-4
    assert max(np.abs(v).max() for v in rounds.run.memory("residual")) > 1e-4


@pytest.mark.parametrize("early", with_long([6, 7], [6]))
def test_all_is_sent_on_the_way_back_whenever_rounds_end(mirrored, early):
    """The last stage takes effect at a synchronization; then, all is dense."""
    settings = {"sparsity": (0.5, 0.9), "rampup_step": 2}
    settings |= {"rampdown_begin_step": 4, "rampdown_step": 2}
    run = dgc.Run(
        *(mirrored, start(), RATE, around(INNER["AdamW"])),
        **settings,
        sync_every=EVERY,
    )
    waiting = []
    for step in range(1, 13):
        run.step(gradients_of(step, 2))
        if step == early:
            run.optimizer.synchronize()
        held = run.memory("residual")
        waiting.append(max(np.abs(parts).max() for parts in held))
    assert waiting[4 - 1] > 1e-4
    assert waiting[early + EVERY - 1 :] == [0.0] * (13 - early - EVERY)


def check_that_an_embedding_moves_by_half(strategy, steps, **kwargs):
    """Check rows that one replica touches, at the end of a round."""
    values = {"table": np.ones((50, 4), "float32")}
    inner = around(INNER["SGD"])
    run = dgc.Run(strategy, values, 0.5, inner, sync_every=2, **kwargs)
    table = run.variables[0]
    slices = [
        tf.IndexedSlices(tf.ones([2, 4]), tf.constant(rows), [50, 4])
        for rows in ([3, 3], [7, 9])
    ]
    for _ in range(steps):
        dgc.apply_own(strategy, run.optimizer, table, slices)
    assert run.optimizer.is_synchronized == (steps % 2 == 0)
    run.optimizer.synchronize()
    expected = np.ones((50, 4))
    # A worker's gradient is twice its share; two replicas are averaged.
    expected[[3, 7, 9]] -= 0.5 * steps / 2 * np.array([[4], [2], [2]])
    np.testing.assert_array_equal(table.numpy(), expected)


def test_embedding_touched_by_one_replica_moves_by_half(mirrored):
    check_that_an_embedding_moves_by_half(mirrored, steps=2)


def test_constraint_holds_for_local_and_common_weights(mirrored):
    with mirrored.scope():
        variable = keras.Variable([0.5, 0.5])
        variable.constraint = keras.constraints.NonNeg()
        optimizer = tfo.SparseLoCo(keras.optimizers.SGD(1.0), sync_every=2)
        optimizer.build([variable])
    gradients = tf.constant([[1.5, 0.0], [-1.0, 0.125]])
    dgc.apply_own(mirrored, optimizer, variable, gradients)
    np.testing.assert_array_equal(
        copies(mirrored, variable), [[0.0, 0.5], [2.5, 0.25]]
    )
    optimizer.synchronize()
    np.testing.assert_array_equal(variable, [1.25, 0.375])


@pytest.fixture(params=[0.0, 0.5], ids=["", "ahead"])
def held_back(mirrored, request):
    """Return an optimizer with a residual of 0.4, and a function.

    The function runs a round of two steps; the weights have no gradient in
    the last step, or in any.
    """
    with mirrored.scope():
        weights, other = keras.Variable([1.0, 1.0]), keras.Variable([1.0])
        optimizer = tfo.SparseLoCo(
            keras.optimizers.SGD(1.0),
            sync_every=2,
            sparsity=(0.5,),
            min_compress_size=2,
            step_ahead=request.param,
        )
        optimizer.build([weights, other])

    def make_round(gradient=None):
        nothing = tf.zeros([2, 1])
        if gradient is None:
            dgc.apply_own(mirrored, optimizer, other, nothing)
        else:
            each = tf.broadcast_to(gradient, [2, 2]) / 2
            dgc.apply_own(mirrored, optimizer, weights, each)
        dgc.apply_own(mirrored, optimizer, other, nothing)

    make_round([0.5, 0.4])
    np.testing.assert_array_equal(weights, [0.5, 1.0])
    return weights, make_round


def test_constraint_holds_without_a_gradient_in_the_last_step(held_back):
    weights, make_round = held_back
    weights.constraint = keras.constraints.NonNeg()
    make_round([0.0, 0.9])
    np.testing.assert_array_equal(weights, [0.5, 0.0])


def test_frozen_weight_does_not_move(held_back):
    """The residual does not move it either."""
    weights, make_round = held_back
    weights.trainable = False
    make_round()
    np.testing.assert_array_equal(weights, [0.5, 1.0])
    weights.trainable = True
    make_round()
    np.testing.assert_allclose(weights, [0.5, 0.6])


def test_variables_of_the_running_step_are_exchanged(mirrored):
    """Variables may have been frozen since the step was traced."""
    model, look = make_model(mirrored, batch_norm=True), Look()
    fit(model, epochs=1)
    before = model.get_weights()
    for layer in model.layers[:2]:
        layer.trainable = False
    fit(model, look, epochs=1)
    assert look.seen == {"step": [False] * 6, "epoch": [True], "train": [True]}
    assert error(model.get_weights()[:1], before[:1]) > 1e-3


def test_movements_of_another_step_are_exchanged(mirrored):
    """The end of the round is traced without it."""
    model = make_model(mirrored)
    first, last = model.layers
    steps = [
        tf.function(step_of(model, layer.trainable_variables))
        for layer in (first, last)
    ]
    first.trainable = False  # Trace the last layer's step first.
    for step in [steps[1]] * EVERY + steps * (EVERY // 2):
        step()
    assert model.optimizer.is_synchronized
    for variable in model.weights:
        np.testing.assert_array_equal(*copies(mirrored, variable))


@pytest.mark.parametrize("step_ahead", with_long([0.0, 0.25], [0.25]))
def test_average_is_no_update_of_another_step(mirrored, step_ahead):
    """The step that ends rounds is traced before the other step runs."""
    with mirrored.scope():
        *weights, average = (keras.Variable(tf.ones(10)) for _ in range(3))
        optimizer = tfo.SparseLoCo(
            *(keras.optimizers.SGD(0.1), 3),
            sparsity=(0.5,),
            min_compress_size=2,
            step_ahead=step_ahead,
        )
        optimizer.build([*weights, average])

    def step_of(weight):
        def replica():
            optimizer.apply([tf.range(10.0)], [weight])
            average.assign(average + 1)

        return tf.function(lambda: mirrored.run(replica))

    steps = [step_of(weight) for weight in weights]
    for i in (0, 1, 0, 0, 1, 0):
        steps[i]()
    optimizer.synchronize()
    for own in copies(mirrored, average):
        np.testing.assert_array_equal(own, np.full(10, 7.0))
    for weight in weights:
        np.testing.assert_array_equal(*copies(mirrored, weight))


def test_frozen_weight_with_a_gradient_moves(mirrored, held_back):
    """It moves on all replicas, as with Keras's optimizers."""
    weights, make_round = held_back
    weights.trainable = False
    make_round([[1.0, 0.0], [0.0, 0.0]])
    # The second replica sends its residual.
    np.testing.assert_allclose(weights, [0.0, 0.8])
    np.testing.assert_array_equal(*copies(mirrored, weights))


def test_weight_assigned_between_rounds_starts_the_next(mirrored):
    run = train(mirrored, around(INNER["SGD"]), steps=2, sync_every=2)
    for variable, value in zip(
        run.variables, start(seed=9).values(), strict=True
    ):
        variable.assign(value)
    held = [sum(parts) for parts in run.memory("residual")]
    zero = [np.zeros_like(g) for g in gradients_of(0, 1)[0]]
    for _ in range(2):
        run.step([zero, zero])
    left = [sum(parts) for parts in run.memory("residual")]
    for weight, value, before, after in zip(
        run.weights(), start(seed=9).values(), held, left, strict=True
    ):
        # Only the earlier residual has moved.
        np.testing.assert_allclose(
            weight - value, after - before, rtol=1e-4, atol=1e-6
        )


def make_model(strategy, batch_norm=False, **kwargs):
    keras.utils.set_random_seed(1)
    norm = [keras.layers.BatchNormalization(momentum=0.5)]
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh"),
                *(norm if batch_norm else []),
                keras.layers.Dense(3),
            ]
        )
        settings = {"sync_every": EVERY, "sparsity": (0.5,)}
        optimizer = tfo.SparseLoCo(
            keras.optimizers.Adam(0.01),
            min_compress_size=10,
            **settings | kwargs,
        )
        model.compile(optimizer, "mse")
    return model


def fit(model, *callbacks, epochs=2, **kwargs):
    """Train on six steps per epoch, so that epochs end within a round."""
    return model.fit(
        *(X, Y),
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        **kwargs,
    )


def test_layer_that_assigns_weights_in_each_step_is_rejected():
    """Replicas' weights would diverge, and so would the start of a round."""
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((6,)), layers.SpectralNormalization(layers.Dense(3))]
    )
    inner = keras.optimizers.SGD(0.1)
    model.compile(tfo.SparseLoCo(inner, sync_every=EVERY), "mse")
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"must not assign .* 'spectral_n"):
        fit(model, epochs=1)
    assert_equal(model.get_weights(), before)
    model.compile(tfo.SparseLoCo(keras.optimizers.SGD(0.1)), "mse")
    fit(model, epochs=1)


class Look(keras.callbacks.Callback):
    """Records whether replicas' weights are equal in methods of callbacks."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def note(self, when):
        strategy = self.model.distribute_strategy
        parts = [copies(strategy, v) for v in self.model.weights]
        equal = all(np.array_equal(a, b) for a, b in parts)
        self.seen.setdefault(when, []).append(equal)

    def on_train_batch_end(self, batch, logs=None):
        self.note("step")

    def on_test_begin(self, logs=None):
        self.note("test")

    def on_predict_begin(self, logs=None):
        self.note("predict")

    def on_epoch_end(self, epoch, logs=None):
        self.note("epoch")

    def on_train_end(self, logs=None):
        self.note("train")


def test_fit_reads_common_weights_everywhere(mirrored):
    model, look = make_model(mirrored, batch_norm=True), Look()
    fit(model, look, validation_data=(X, Y))
    # A validation ends the round of the epoch's last two steps.
    assert look.seen == {
        "step": [False] * 12,
        "test": [True] * 2,
        "epoch": [True] * 2,
        "train": [True],
    }


def test_steps_end_rounds_of_weights_not_of_statistics(mirrored):
    model, look = make_model(mirrored), Look()
    fit(model, look)
    assert look.seen["step"] == [False, False, False, True, False, False] * 2


def test_statistics_are_the_mean_over_replicas(mirrored):
    """The mean is linear, so the time of averaging does not matter."""
    seen = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            model_copies = [
                copies(mirrored, v) for v in self.model.non_trainable_variables
            ]
            seen.append(model_copies)

    model = make_model(mirrored, batch_norm=True)
    fit(model, Note(), epochs=1)
    assert len(seen[-1]) == 2
    for variable, parts in zip(
        model.non_trainable_variables, seen[-1], strict=True
    ):
        assert error(*[[part] for part in parts]) > 1e-3
        for part in copies(mirrored, variable):
            np.testing.assert_allclose(part, np.mean(parts, 0), rtol=1e-6)


def step_of(model, variables=None):
    """Return a step with different gradients per replica, without Keras."""
    strategy = model.distribute_strategy
    variables = variables or model.trainable_variables
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)

    def replica():
        sign = 1.0 - 1.5 * replicas_of().rank
        gradients = [tf.fill(v.shape, sign) for v in variables]
        model.optimizer.apply(gradients, variables)

    return lambda: strategy.run(replica)


def step_alone(model):
    step_of(model)()


# A validation calls `evaluate`.
@pytest.mark.parametrize(
    "read", with_long(["evaluate", "predict"], ["evaluate"])
)
def test_evaluate_and_predict_synchronize(mirrored, read):
    model, look = make_model(mirrored), Look()
    step_alone(model)
    assert not model.optimizer.is_synchronized
    arguments = (X, Y) if read == "evaluate" else (X,)
    getattr(model, read)(*arguments, verbose=0, callbacks=[look])
    assert list(look.seen.values()) == [[True]]
    assert model.optimizer.is_synchronized


class Pair(keras.Model):
    """Two compiled parts, each trained by its own optimizer, as in a GAN."""

    def __init__(self, strategy):
        super().__init__()
        self.a, self.b = make_model(strategy), make_model(strategy)

    def call(self, x):
        return self.a(x) + self.b(x)

    def train_step(self, data):
        x, y = data
        losses = []
        for part in (self.a, self.b):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            variables = part.trainable_variables
            gradients = tape.gradient(loss, [v.value for v in variables])
            part.optimizer.apply(gradients, variables)
            losses.append(loss)
        return {"own": losses[0]}


@pytest.mark.long
def test_optimizers_of_compiled_parts_synchronize_too(mirrored, tmp_path):
    with mirrored.scope():
        model = Pair(mirrored)
        model.compile(loss="mse")
    look = Look()
    fit(model, look, epochs=1)
    assert look.seen.pop("step") == [False] * 3 + [True] + [False] * 2
    assert look.seen == {"epoch": [True], "train": [True]}
    for name, whole in (("all", model), ("part", model.a)):
        path = tmp_path / f"{name}.weights.h5"
        whole.save_weights(path)
        before = path.read_bytes()
        step_alone(model.a)
        with pytest.raises(RuntimeError, match="after 1 of 4 local steps"):
            whole.save_weights(path)
        assert path.read_bytes() == before
        whole.predict(X, verbose=0)
        assert model.a.optimizer.is_synchronized


def test_optimizer_without_a_model_synchronizes_too(mirrored):
    model = make_model(mirrored)
    step_alone(model)
    optimizer = model.optimizer
    with mirrored.scope():
        model.compile("sgd", "mse")
    model.predict(X, verbose=0)
    assert optimizer.is_synchronized


def test_optimizer_that_is_wrapped_synchronizes_too(mirrored):
    model = make_model(mirrored)
    step_alone(model)
    inner = model.optimizer
    with mirrored.scope():
        model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
    assert not inner.is_synchronized
    model.evaluate(X, Y, verbose=0)
    assert inner.is_synchronized


ENDS = [
    ("a.weights.h5", "finalize_variable_values"),
    ("a.keras", "synchronize"),
]


@pytest.mark.parametrize(("name", "end"), with_long(ENDS, ENDS[1:]))
def test_local_weights_are_not_saved(mirrored, tmp_path, end, name):
    """An existing file is kept."""
    model = make_model(mirrored)
    save = model.save if name == "a.keras" else model.save_weights
    save(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    step_alone(model)
    with pytest.raises(RuntimeError, match="after 1 of 4 local steps"):
        save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == before
    arguments = [] if end == "synchronize" else [model.trainable_variables]
    getattr(model.optimizer, end)(*arguments)
    save(tmp_path / name)
    if name == "a.keras":
        loaded = keras.saving.load_model(tmp_path / name)
        assert loaded.optimizer.sync_every == EVERY
    else:
        loaded = make_model(NONE)
        loaded.optimizer.build(loaded.trainable_variables)
        loaded.load_weights(tmp_path / name)
    assert_equal(loaded.get_weights(), model.get_weights())


def test_local_weights_are_not_exported(mirrored, tmp_path):
    model = make_model(mirrored)
    step_alone(model)
    for save, name in ((model.export, "exported"), (model.save, "a.h5")):
        with pytest.raises(RuntimeError, match="after 1 of 4 local steps"):
            save(tmp_path / name)
        assert not (tmp_path / name).exists()


def test_local_weights_are_rejected_by_the_optimizer(mirrored, tmp_path):
    """Keras's `save_model` does not call the model's method."""
    model = make_model(mirrored)
    step_alone(model)
    with pytest.raises(RuntimeError, match="after 1 of 4 local steps"):
        keras.saving.save_model(model, tmp_path / "a.keras")


def check_that_accumulated_gradients_make_one_step(strategy, **kwargs):
    """Compare training by pairs of gradients with training by their means."""
    once, twice = (
        train(
            *(strategy, around(INNER["Adam"])),
            steps=0,
            sync_every=2,
            **kwargs | more,
        )
        for more in ({}, {"gradient_accumulation_steps": 2})
    )
    for step in range(7):
        pair = [gradients_of(2 * step + i, 2) for i in range(2)]
        for gradients in pair:
            left = current_round([twice.optimizer])
            twice.step(gradients)
        assert (left.ends, left.batches) == (step % 2 == 1, 4)
        once.step(
            [
                [(a + b) / 2 for a, b in zip(*own, strict=True)]
                for own in zip(*pair, strict=True)
            ]
        )
        assert error(twice.weights(), once.weights()) < 1e-6
    for run in (once, twice):
        assert not run.optimizer.is_synchronized
        run.optimizer.synchronize()
    assert error(twice.weights(), once.weights()) < 1e-6


def test_accumulated_gradients_make_one_local_step(mirrored):
    check_that_accumulated_gradients_make_one_step(mirrored)


def check_that_an_overflow_is_no_step(strategy, **kwargs):
    """Compare training in which one replica overflows twice with another."""
    weights = []
    for overflows in ((2, 4), ()):
        run = dgc.Run(
            *(strategy, start(), 1.0, around(INNER["SGD"])),
            sparsity=(0.9,),
            sync_every=3,
            **kwargs,
        )
        inner = run.optimizer
        with strategy.scope():
            run.optimizer = keras.optimizers.LossScaleOptimizer(
                inner, initial_scale=4.0
            )
            run.optimizer.build(run.variables)
        scale = 4.0
        for step in range(7):
            gradients = gradients_of(step, 2)
            if step in overflows:
                bad = [[np.full_like(g, np.inf) for g in gradients[1]]]
                run.step([gradients[0], *bad])
                scale /= 2
            # A power of two changes no bit of the quotient.
            scaled = [[scale * g for g in own] for own in gradients]
            run.step(scaled)
        assert inner.iterations.numpy() == 7
        assert not inner.is_synchronized
        inner.synchronize()
        weights.append(run.weights())
    np.testing.assert_equal(*weights)


def test_overflow_on_one_replica_is_no_local_step(mirrored):
    check_that_an_overflow_is_no_step(mirrored)


@pytest.mark.long
def test_monitor_measures_rounds_that_end_with_an_epoch(mirrored):
    model = make_model(mirrored, sparsity=(0.8,), sync_every=7)
    monitor = tfo.callbacks.CompressionMonitor(every=1)
    before = model.get_weights()
    history = fit(model, monitor, epochs=1).history
    compressor, after = model.optimizer._compressor, model.get_weights()
    parts = [copies(mirrored, residual) for residual in compressor.residuals]
    held = sum(np.abs(part).sum() for each in parts for part in each)
    moved = sum(
        np.abs(after[i] - before[i]).sum() for i in compressor.compressed
    )
    # The round ends after six steps, not seven.
    expected = pytest.approx(6 * held / moved, rel=1e-4)
    assert history["residual_age"] == [expected]


@contextlib.contextmanager
def short_runs():
    """Collect the warnings of runs with few synchronizations."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    messages = [str(warning.message) for warning in caught]
    found += [message for message in messages if "A run of" in message]


RUNS = [(49, 98, True), (50, None, True), (49, None, False)]


@pytest.mark.parametrize(
    ("epochs", "rounds", "known"), with_long(RUNS, RUNS[1:])
)
def test_run_of_few_synchronizations_is_warned_of(epochs, rounds, known):
    """An epoch has two rounds; the second one ends early."""
    model = make_model(NONE)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    if not known:
        data = data.filter(lambda x, y: True)
    with short_runs() as found:
        model.fit(data, epochs=epochs, verbose=0)
    assert len(found) == (rounds is not None)
    assert all(f"Received: {rounds}, with sync_every=4" in m for m in found)
    # A step that only detects the end of the data does not count.
    assert model.optimizer.iterations.numpy() == epochs * len(X) // 8


@pytest.mark.parametrize("batch_size", [6, 1])
def test_short_run_of_single_steps_is_warned_of(batch_size):
    model = make_model(NONE, sync_every=1)
    with short_runs() as found:
        model.fit(X, Y, batch_size=batch_size, epochs=3, verbose=0)
    steps = 3 * len(X) // batch_size
    expected = [f"Received: {steps}, with sync_every=1"] if steps < 100 else []
    assert len(found) == len(expected)
    assert all(e in f for e, f in zip(expected, found, strict=True))


def test_each_of_several_optimizers_is_checked_for_a_short_run():
    """The first one makes 104 rounds, and the others make 52 and 26."""
    model = make_model(NONE, sync_every=1)
    model.others = [
        tfo.SparseLoCo(keras.optimizers.SGD(), every) for every in (2, 4)
    ]
    with short_runs() as found:
        model.fit(X, Y, batch_size=6, epochs=13, verbose=0)
    assert len(found) == 1
    assert "Received: 26, with sync_every=4" in found[0]


def test_short_run_is_counted_over_its_calls_of_fit():
    """Each call has four updates in two epochs."""
    model = make_model(NONE, sync_every=1, gradient_accumulation_steps=16)
    with short_runs() as found:
        for epoch in (0, 8):
            span = {"initial_epoch": epoch, "epochs": epoch + 8}
            model.fit(X[:8], Y[:8], batch_size=1, verbose=0, **span)
    assert len(found) == 2
    assert "Received: 4, with" in found[0]
    assert "Received: 8, with" in found[1]


def test_synchronize_is_rejected_within_a_step(mirrored):
    run = train(mirrored, around(INNER["SGD"]), steps=1, sync_every=2)
    calls = [
        lambda: mirrored.run(run.optimizer.synchronize),
        tf.function(run.optimizer.synchronize, autograph=False),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="must be called between steps"):
            call()
    assert not run.optimizer.is_synchronized


def test_synchronize_does_nothing_without_local_steps(mirrored):
    run = train(mirrored, around(INNER["SGD"]), steps=1, sparsity=(0.5,))
    before = run.weights()
    run.optimizer.synchronize()
    np.testing.assert_equal(run.weights(), before)
    assert run.optimizer.is_synchronized
    assert tfo.SparseLoCo(INNER["SGD"](), sync_every=3).is_synchronized


@pytest.mark.parametrize(
    ("sync_every", "sparsity"),
    [(8, 0.9738), (15, 0.9447), (30, 0.8713), (60, 0.632), (120, 0.5)],
)
@pytest.mark.parametrize("steps", [3240, 100_000])
def test_recommended_rounds_send_a_thousandth_of_the_bytes(
    steps, sync_every, sparsity
):
    optimizer = tfo.SparseLoCo.for_steps(
        steps, INNER["SGD"](), sync_every=sync_every
    )
    assert optimizer.sparsity == (sparsity,)
    assert optimizer._schedule.stages == [sparsity]
    assert optimizer.outer_learning_rate == 1.4
    assert (optimizer.value_dtype, optimizer.residual_decay) == ("int2", 1.0)
    assert optimizer.step_ahead == 0.25


@pytest.mark.parametrize(
    ("steps", "sparsity"), [(2400, 0.9667), (1600, 0.95), (160, 0.5), (2, 0.5)]
)
def test_recommended_rounds_of_a_short_run_send_each_entry_ten_times(
    steps, sparsity
):
    """But a round of eight steps sends at most half of the entries."""
    optimizer = tfo.SparseLoCo.for_steps(steps, INNER["SGD"](), sync_every=8)
    assert optimizer.sparsity == (sparsity,)


def test_recommended_rounds_may_be_overridden():
    optimizer = tfo.SparseLoCo.for_steps(
        *(600, INNER["SGD"]()),
        sync_every=8,
        sparsity=(0.5,),
        outer_learning_rate=1.0,
        value_dtype="int4",
    )
    assert (optimizer.sparsity, optimizer.value_dtype) == ((0.5,), "int4")
    assert optimizer.outer_learning_rate == 1.0
    overlapping = tfo.SparseLoCo.for_steps(
        600, INNER["SGD"](), sync_every=8, overlap=True
    )
    assert overlapping.step_ahead == 0.0
    for value, kind in ((0, ValueError), (2.5, TypeError)):
        with pytest.raises(kind, match="`sync_every` must be an integer >= 1"):
            tfo.SparseLoCo.for_steps(600, INNER["SGD"](), sync_every=value)


def test_config_keeps_the_step_ahead():
    optimizer = tfo.SparseLoCo(INNER["SGD"](), sync_every=7, step_ahead=0.5)
    assert tfo.SparseLoCo.from_config(optimizer.get_config()).step_ahead == 0.5
