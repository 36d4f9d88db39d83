"""Keras may run any function as a model's step."""

import functools
import itertools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from custom_steps import Guide, X, Y
from one_process import TOLERANCE, assert_trains_alike, run_twice

from tf_optimizers.workers.steps.replica_state import replica


@pytest.fixture
def trains(monkeypatch):
    """Record, for each call of a model in a step, whether it trains."""
    known, call = [], Guide.call

    def noting(self, *args):
        if replica.share is not None:
            known.append(replica.is_training)
        return call(self, *args)

    monkeypatch.setattr(Guide, "call", noting)
    return known


def bare(step):
    """Decorate a step without `functools.wraps`."""

    def wrapper(*args):
        return step(*args)

    return wrapper


def kept(step):
    return functools.wraps(step)(bare(step))


def measure(self, data):
    x, y = data
    self.mae.update_state(y, self(x))
    return {"mae": self.mae.result()}


class Bare(Guide):
    train_step, test_step = bare(Guide.train_step), bare(measure)


class Kept(Guide):
    train_step, test_step = kept(Guide.train_step), kept(measure)


class Aliased(Guide):
    def learn(self, data):
        return super().train_step(data)

    train_step, test_step = learn, measure


class Partial(Guide):
    @property
    def train_step(self):
        return functools.partial(Guide.train_step, self)

    test_step = functools.partialmethod(measure)


def assigned(make):
    def made():
        model = Guide()
        model.train_step = make(lambda data: Guide.train_step(model, data))
        model.test_step = make(lambda data: measure(model, data))
        return model

    return made


class Misnamed(Guide):
    """Has a test step that is named like a train step."""

    def test_step(self, data):
        return Guide.train_step(self, data)

    test_step.__name__ = "train_step"


class Both(Guide):
    """Has one step for training and for tests."""

    test_step = Guide.train_step


def within(model):
    def run(data):
        return Guide.train_step(model, data)

    return run


class Measured(Guide):
    """Has metrics that Keras's own step would not update."""

    test_step = measure


def closed():
    model = Measured()
    model.train_step, model.test_step = within(model), kept(model.test_step)
    return model


MODELS = {
    "bare": Bare,
    "kept": Kept,
    "aliased": Aliased,
    "partial": Partial,
    "lambda": assigned(lambda step: step),
    "closure": closed,
    "function": assigned(tf.function),
    "misnamed": Misnamed,
    "both": Both,
}


def trained(name, **compile_arguments):
    """Return the model, its losses and its evaluation."""
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    model.compile(keras.optimizers.SGD(0.1), "mse", **compile_arguments)
    arguments = {"batch_size": 3, "verbose": 0}
    history = model.fit(X, Y, epochs=2, shuffle=False, **arguments)
    evaluated = model.evaluate(X, Y, return_dict=True, **arguments)
    return model, [*history.history.values(), *evaluated.values()]


@pytest.mark.parametrize(
    "name",
    cases.with_long(MODELS, set(MODELS) - {"bare", "function", "misnamed"}),
)
def test_step_of_any_name_equals_one_process(ours, trains, name):
    """The last batch has a row on one replica only."""
    assert_trains_alike(ours, lambda: trained(name))
    known = [is_training for is_training, _ in itertools.groupby(trains)]
    assert known == ([False] if name == "both" else [True, False])


@pytest.mark.parametrize("name", ["aliased", "kept"])
def test_step_of_any_name_is_one_in_a_loop(ours, trains, name):
    """The user's code passes the method to `run`."""

    def made():
        keras.utils.set_random_seed(1)
        model = MODELS[name]()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    expected, before = made(), made().get_weights()
    expected.train_step((tf.constant(X[:3]), tf.constant(Y[:3])))
    with ours.scope():
        actual = made()
    data = tf.data.Dataset.from_tensors((X[:3], Y[:3]))
    for batch in ours.experimental_distribute_dataset(data):
        ours.run(actual.train_step, (batch,))
    assert set(trains) == {True}
    assert cases.error(expected.get_weights()[:1], before[:1]) > 1e-2
    assert cases.error(actual.weights, expected.weights) < TOLERANCE


def test_steps_under_another_strategy_are_as_they_were():
    """TensorFlow's strategies get the function that Keras passes."""
    ran = []
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = Guide()
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    run = strategy.run
    strategy.run = lambda function, args: (
        ran.append(function) or run(function, args)
    )
    model.fit(X[:3], Y[:3], verbose=0)
    assert ran == [model.train_step]
    assert np.isfinite(model.get_weights()[0]).all()


class Returning(keras.Sequential):
    """Returns variables, numbers and booleans in addition to its loss."""

    def __init__(self):
        super().__init__([keras.Input((4,)), keras.layers.Dense(2)])
        self.tracker = keras.metrics.Mean(name="mean")

    def train_step(self, data):
        logs = super().train_step(data)
        x, _ = data
        self.tracker.update_state(logs["loss"])
        return logs | {
            "rate": self.optimizer.learning_rate,
            "steps": self.optimizer.iterations,
            "bias": self.layers[-1].bias[0],
            "rows": self.tracker.count,
            "true": True,
            "finite": tf.reduce_all(tf.math.is_finite(x)),
            "three": 3,
            "half": np.float32(0.5),
        }


@pytest.mark.parametrize("eagerly", cases.with_long([False, True], [True]))
def test_steps_may_return_variables_and_truth_values(ours, eagerly):
    def logs():
        keras.utils.set_random_seed(1)
        model = Returning()
        schedule = keras.optimizers.SGD(0.1)
        model.compile(schedule, "mse", run_eagerly=eagerly)
        seen = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(dict(logs))
        )
        model.fit(
            *(X, Y), batch_size=3, shuffle=False, verbose=0, callbacks=[note]
        )
        return seen

    expected, found = run_twice(ours, logs)
    for own, other in zip(found, expected, strict=True):
        assert own.keys() == other.keys()
        for name, value in other.items():
            assert float(own[name]) == pytest.approx(float(value), 1e-5), name


@pytest.mark.parametrize(
    ("replicas", "name", "loops"),
    cases.with_long(
        [
            *(("ours", "SGD", False), ("ours", "Adam", True)),
            *(("ours", "SGD", True), ("ours", "Adam", False)),
            *(("of_one_replica", "AdamW", each) for each in (False, True)),
            ("of_one_replica", "SGD", False),
        ],
        [
            *(("ours", "SGD", True), ("ours", "Adam", False)),
            ("of_one_replica", "SGD", False),
        ],
    ),
)
def test_variables_made_outside_are_rejected(request, replicas, name, loops):
    """With several replicas, updates of these would deadlock."""
    strategy = request.getfixturevalue(replicas)
    optimizer = getattr(keras.optimizers, name)(0.1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile(optimizer, "mse")
    model.build((None, 4))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    before = model.get_weights()
    with pytest.raises(
        ValueError, match=r"created outside of it: .*dense.*/kernel"
    ):
        if loops:
            strategy.run(step, (X,))
        else:
            model.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


def test_optimizer_of_keras_made_outside_trains_as_made_inside(ours):
    def trained(optimizer):
        keras.utils.set_random_seed(1)
        with ours.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(optimizer or keras.optimizers.Adam(0.1), "mse")
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
        return [*model.get_weights(), *model.optimizer.variables]

    found, expected = trained(keras.optimizers.Adam(0.1)), trained(None)
    assert found[2] == expected[2] > 0  # The number of steps.
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.parametrize("is_traced", [False, True])
def test_one_replica_runs_a_function_that_updates(of_one_replica, is_traced):
    with of_one_replica.scope():
        variable = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)

    @tf.function
    def step():
        optimizer.apply([tf.ones(2)], [variable])

    def run():
        of_one_replica.run(step)

    (tf.function(run) if is_traced else run)()
    np.testing.assert_array_equal(variable, [0.5, 1.5])
