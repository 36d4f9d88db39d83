"""State that steps assign on each replica is the mean when it is read."""

import types

import cases
import keras
import numpy as np
import pytest
import state
import tensorflow as tf
from arrays import assert_equal
from local import assert_copies_agree, copies, per_replica

import tf_optimizers as tfo

# For steps of 0.1 and more.
TOLERANCE = 1e-6


def moved(model):
    """Return the largest difference between replicas' values of a center."""
    first, second = copies(model.distribute_strategy, model.layers[0].center)
    return np.abs(first - second).max()


class Seen(keras.callbacks.Callback):
    """Records the differences between replicas, by batch and method."""

    def __init__(self):
        super().__init__()
        self.batches, self.places = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(moved(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.places.append(moved(self.model))

    on_test_batch_end = on_predict_batch_end = on_epoch_end


@pytest.mark.parametrize(
    "kind", cases.with_long(["keras", "tensorflow"], ["tensorflow"])
)
def test_state_of_rows_is_that_of_one_process_after_an_epoch(ours, kind):
    expected = state.center(kind)
    state.fit(expected)
    with ours.scope():
        model = state.center(kind)
    seen = Seen()
    data = state.X, state.Y
    state.fit(model, callbacks=[seen], validation_data=data)
    assert min(seen.batches) > 0.01
    assert seen.places == [0] * len(seen.places)
    difference = state.center_of(model) - state.center_of(expected)
    assert np.abs(difference).max() < TOLERANCE
    # `fit` has measured the current state.
    measured = model.history.history["val_loss"][-1]
    assert model.evaluate(*data, verbose=0) == pytest.approx(measured, 1e-6)
    loss = expected.evaluate(*data, verbose=0)
    assert measured == pytest.approx(loss, 1e-5)


class Pulls(keras.losses.Loss):
    """Pulls predictions to a moving mean of the targets.

    Args:
        make: The class of the variable.
    """

    def __init__(self, make):
        super().__init__()
        self.center = make(np.zeros(2, "float32"), trainable=False)

    def call(self, y_true, y_pred):
        mean = keras.ops.mean(y_true, axis=0)
        self.center.assign(0.75 * self.center + 0.25 * mean)
        return keras.ops.mean((y_pred - self.center) ** 2, axis=-1)


@pytest.mark.parametrize("make", [keras.Variable, tf.Variable])
def test_state_of_a_loss_is_that_of_one_process_after_an_epoch(ours, make):
    def trained():
        model = state.compiled(keras.layers.Dense(2))
        model.compile(model.optimizer, Pulls(make))
        state.fit(model)
        return model.loss.center

    expected = np.array(trained())
    with ours.scope():
        center = trained()
    for part in copies(ours, center):
        np.testing.assert_allclose(part, expected, TOLERANCE)


class Holds(keras.layers.Layer):
    """Moves a variable that it holds in a `tf.Module`."""

    def __init__(self, center):
        super().__init__()
        self.module = tf.Module()
        self.module.parts = {"centers": [center]}

    def call(self, x, training=False):
        if training:
            state.moved_towards(self.module.parts["centers"][0], x[:, :2])
        return x


@pytest.mark.parametrize(
    ("place", "make", "trainable"),
    [
        ("loss", keras.Variable, False),
        ("loss", keras.Variable, True),
        ("loss", tf.Variable, True),
        ("traced loss", tf.Variable, False),
        ("regularizer", keras.Variable, False),
        ("regularizer", tf.Variable, False),
        ("module", keras.Variable, False),
        ("module", tf.Variable, False),
        ("object", keras.Variable, False),
        ("object", tf.Variable, False),
    ],
)
def test_state_that_keras_does_not_track_is_that_of_one_process(
    ours, place, make, trainable
):
    def trained():
        keras.utils.set_random_seed(1)
        center = make(np.zeros(2, "float32"), trainable=trainable)
        layers, loss = [keras.layers.Dense(2)], "mse"
        if place == "module":
            layers = [Holds(center), *layers]
        elif place == "regularizer":
            layers[0].activity_regularizer = lambda outputs: (
                0.0 * keras.ops.sum(state.moved_towards(center, outputs))
            )
        elif place == "loss":
            loss = state.pull(center)
        elif place == "object":
            box = types.SimpleNamespace(center=center)
            loss = state.pull(
                box, lambda box, values: state.moved_towards(box.center, values)
            )
        else:
            loss = state.pull(center, tf.function(state.moved_towards))
        model = state.compiled(*layers)
        model.compile(model.optimizer, loss)
        state.fit(model)
        return center

    expected = np.array(trained())
    with ours.scope():
        center = trained()
    for part in copies(ours, center):
        np.testing.assert_allclose(part, expected, TOLERANCE, 1e-7)


class Searched(list):
    """Counts how often its elements are listed."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_variables_are_searched_again_only_after_a_step_is_traced(ours):
    """A user's objects may be many."""
    with ours.scope():
        model = state.compiled(keras.layers.Dense(2))
        boxes = [
            types.SimpleNamespace(
                center=tf.Variable([0.0, 0.0]), parts=Searched()
            )
            for _ in range(2)
        ]
    data = state.X, state.Y
    for box in boxes:

        def move(box, values):
            return state.moved_towards(box.center, values)

        model.compile(model.optimizer, state.pull(box, move))
        state.fit(model, epochs=1, validation_data=data)
        times = box.parts.times
        assert 0 < times <= 3
        state.fit(model, epochs=3, validation_data=data)
        assert box.parts.times == times
        assert np.abs(box.center).max() > 0.1
        assert_copies_agree(ours, [box.center])


@pytest.mark.parametrize("make", [keras.Variable, tf.Variable])
def test_loss_made_outside_of_the_scope_keeps_its_state(ours, make):
    """Both devices assign the only copy, which is not averaged."""
    loss = Pulls(make)
    with ours.scope():
        model = state.compiled(keras.layers.Dense(2))
    model.compile(model.optimizer, loss)
    state.fit(model)
    assert np.abs(np.array(loss.center)).max() > 0


def test_statistics_are_common_when_read(ours, tmp_path):
    """Custom steps count too, and files have the values of `predict`."""
    with ours.scope():
        model = state.compiled(
            keras.layers.BatchNormalization(), keras.layers.Dense(2)
        )
    mean = model.layers[0].moving_mean
    halves = [state.X[:6], state.X[6:]]
    rows = per_replica(ours, lambda rank: tf.constant(halves[rank]))

    @tf.function
    def train():
        ours.run(lambda x: model(x, training=True), (rows,))

    def step():
        train()
        first, second = copies(ours, mean)
        assert np.abs(first - second).max() > 1e-3
        return (first + second) / 2

    def check(expected):
        for part in copies(ours, mean):
            np.testing.assert_allclose(part, expected, 1e-6)

    expected = step()
    predictions = model.predict(state.X, verbose=0)
    check(expected)
    expected = step()
    model.evaluate(state.X, state.Y, verbose=0)
    check(expected)
    expected = step()
    model.save(tmp_path / "model.keras")
    check(expected)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    predictions = model.predict(state.X, verbose=0)
    np.testing.assert_array_equal(
        loaded.predict(state.X, verbose=0), predictions
    )
    np.testing.assert_array_equal(
        loaded.layers[0].moving_mean, copies(ours, mean)[0]
    )


class Follows(keras.Sequential):
    """Keeps averages of the weights of its last layer."""

    def follow(self, trainable):
        self.averages = [
            keras.Variable(weight * 0, trainable=trainable)
            for weight in self.layers[-1].weights
        ]
        self.steps = keras.Variable(0, trainable=False, dtype="int32")

    def train_step(self, data):
        logs = super().train_step(data)
        for average, weight in zip(
            self.averages, self.layers[-1].weights, strict=True
        ):
            average.assign(0.3 * average + 0.7 * weight)
        self.steps.assign_add(1)
        return logs


def test_replicas_that_get_the_same_keep_it(ours):
    """Counters, averages of weights and aggregated state are bitwise equal."""

    with ours.scope():
        keras.utils.set_random_seed(1)
        layers = [state.Center(aggregation="mean"), keras.layers.Dense(2)]
        model = Follows([keras.Input((4,)), *layers])
        model.follow(trainable=False)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    found = []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: found.append(model.get_weights())
    )
    state.fit(model, callbacks=[keep])
    assert_equal(model.get_weights(), found[-1])
    assert_copies_agree(ours, model.weights)
    assert int(model.steps.numpy()) == 6
    assert all(ours.common_state.is_assigned(v) for v in model.averages)


@pytest.mark.filterwarnings(
    "ignore:SparseLoCo saves traffic:UserWarning",
    "ignore:Gradients do not exist:UserWarning",
)
@pytest.mark.parametrize("overlap", cases.with_long([False, True], [True]))
def test_average_of_local_weights_is_no_update(ours, overlap):
    """Replicas do not compress what a step assigns to trainable weights."""
    with ours.scope():
        model = Follows([keras.Input((4,)), keras.layers.Dense(2)])
        model.follow(trainable=True)
        optimizer = tfo.SparseLoCo(
            keras.optimizers.SGD(0.1),
            sync_every=2,
            sparsity=(0.5,),
            min_compress_size=2,
            overlap=overlap,
        )
        model.compile(optimizer, "mse")
    with pytest.raises(RuntimeError, match="make the variable `trainable=Fal"):
        state.fit(model)


@pytest.mark.parametrize("method", ["fit", "predict", "save"])
def test_weights_of_rows_are_rejected(ours, tmp_path, method):
    """A step that moves weights by its rows' gradients needs an optimizer."""

    class Moves(keras.Sequential):
        def train_step(self, data):
            x, *_ = data
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(self(x) ** 2)
            kernel = self.trainable_weights[0]
            kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
            return {"loss": loss}

    with ours.scope():
        model = Moves([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile()
    with pytest.raises(RuntimeError) as caught:
        if method == "fit":
            state.fit(model)
        model.train_on_batch(state.X, state.Y)
        if method == "predict":
            model.predict(state.X, verbose=0)
        model.save(tmp_path / "model.keras")
    assert "must have the same weights before" in str(caught.value)
    assert f"assigns to `{model.trainable_weights[0].path}`" in str(
        caught.value
    )


def test_state_without_a_mean_is_named(ours):
    with ours.scope():
        model = state.compiled(state.Counter(), keras.layers.Dense(2))
    with pytest.warns(UserWarning, match="must be floating-point") as warned:
        state.fit(model)
    (message,) = {str(each.message) for each in warned}
    assert f"`{model.layers[0].count.path}` of dtype int32" in message
    assert len(warned) == 1


def test_states_of_rows_stay_with_their_replica(ours):
    """A recurrent layer keeps them for the next batch of the same rows."""
    with ours.scope():
        layers = [keras.Input(batch_shape=(2, 3, 1))]
        layers += [keras.layers.SimpleRNN(2, stateful=True)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    x = state.X.reshape(4, 12, 1)[:, :3]
    model.fit(x, x[:, :2, 0], batch_size=4, shuffle=False, verbose=0)
    first, second = copies(ours, model.layers[0].states[0])
    assert np.abs(first - second).max() > 1e-3


def test_scalars_that_a_script_sets_are_not_compared(ours):
    with ours.scope():
        model = state.compiled(keras.layers.Dense(2))
    ours.common_state.take_set()
    model.optimizer.learning_rate = 0.5
    assert not ours.common_state.take_set()
    model.set_weights(model.get_weights())
    assert ours.common_state.take_set()
