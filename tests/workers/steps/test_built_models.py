"""Models with a custom step that `fit` has to build."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_process import run_twice

X, Y = np.ones((6, 4), "float32"), np.ones((6, 1), "float32")


class Halves(keras.Model):
    """Its step calls it with two of four columns."""

    columns = 2

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(3), keras.layers.Dense(1)

    def call(self, x):
        return self.last(self.inner(x))

    def inner(self, x):
        return self.first(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x[:, : self.columns]) - y) ** 2)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class FitsLater(Halves):
    """`call` fails at the data, after it has built a layer."""

    def inner(self, x):
        return super().inner(x) @ keras.ops.eye(3 if x.shape[1] == 2 else 9)


class FitsAtOnce(Halves):
    """`call` fails at the data, before it has built a layer."""

    def inner(self, x):
        return super().inner(x @ keras.ops.eye(2))


class NeedsValues(Halves):
    """`call` needs the result of a layer that it has built."""

    columns = 4

    def inner(self, x):
        x = super().inner(x)
        return x if float(keras.ops.sum(x)) < 1e6 else -x


class Unshaped(Halves):
    """`call` returns a tensor of unknown rank, and leaves out a layer."""

    columns = 4

    def __init__(self):
        super().__init__()
        self.scale = keras.Sequential([keras.layers.Rescaling(2.0)])

    def call(self, x):
        return tf.squeeze(super().call(x))

    def train_step(self, data):
        x, y = data
        return super().train_step((self.scale(x), y[:, 0]))


class Tupled(Halves):
    """Has a tuple of layers, which TensorFlow wraps."""

    columns = 4

    def __init__(self):
        super().__init__()
        self.both = self.first, self.last


class Wrong(Halves):
    """Has an error that it finds at any data, in `call` or `build`."""

    def __init__(self, place):
        super().__init__()
        self.place = place
        if place == "build":
            self.first.build = self.fail

    def inner(self, x):
        if self.place == "early":
            self.fail()
        x = super().inner(x)
        return self.fail() if self.place == "late" else x

    def fail(self, shape=None):
        raise KeyError("a typo of the user")


def fitted(model, run_eagerly=False):
    keras.utils.set_random_seed(1)
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=run_eagerly)
    return model.fit(X, Y, verbose=0).history["loss"][0]


@pytest.mark.parametrize(
    ("make", "eagerly"),
    [
        *((FitsAtOnce, False), (NeedsValues, True), (Unshaped, False)),
        (Tupled, False),
    ],
)
def test_step_builds_what_call_does_not(ours, make, eagerly):
    expected, loss = run_twice(ours, lambda: fitted(make(), eagerly))
    assert loss == pytest.approx(expected, 1e-5)


def test_layers_built_for_other_data_are_an_error(ours):
    """The step would find a layer of another shape."""
    fitted(FitsLater())
    with (
        ours.scope(),
        pytest.raises(RuntimeError, match="not dense.*error in `call`"),
    ):
        fitted(FitsLater())


@pytest.mark.parametrize("place", ["early", "late", "build"])
def test_error_of_the_user_is_shown(ours, place):
    with ours.scope(), pytest.raises(Exception, match="a typo of the user"):
        fitted(Wrong(place))


def error_of_values(y_true, y_pred):
    """Compute a metric in NumPy, as libraries of metrics do."""
    return np.mean(np.abs(np.array(y_true) - np.array(y_pred)), -1)


def test_eager_metric_may_need_values(ours):
    def run():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        metrics = [error_of_values]
        model.compile("sgd", "mse", metrics=metrics, run_eagerly=True)
        return model.fit(X, Y, verbose=0).history["error_of_values"]

    expected, found = run_twice(ours, run)
    assert found == pytest.approx(expected, 1e-5)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_first_batch_of_a_generator_trains_a_model_without_weights(ours):
    with ours.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(((X, Y) for _ in range(3)), shuffle=False, verbose=0)
    assert model.optimizer.iterations.numpy() == 3


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("eagerly", [False, True])
def test_generator_may_give_none_for_weights(ours, eagerly):
    def run():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=eagerly)

        def batches():
            return ((X[:rows], Y[:rows], None) for rows in (6, 3))

        logs = model.fit(batches(), shuffle=False, verbose=0).history
        return [*logs["loss"], model.evaluate(batches(), verbose=0)]

    expected, found = run_twice(ours, run)
    assert found == pytest.approx(expected, 1e-5)


class Composite(keras.Model):
    """Its `call` needs a ragged or sparse tensor."""

    def __init__(self):
        super().__init__()
        self.last = keras.layers.Dense(1)

    def call(self, x):
        if isinstance(x, tf.RaggedTensor):
            return self.last(x.to_tensor(shape=(None, 3)))
        return self.last(tf.sparse.sparse_dense_matmul(x, tf.ones((4, 3))))


@pytest.mark.parametrize(
    "x",
    [
        tf.ragged.constant([[1.0], [2, 3], [], [4, 5, 6], [7], [8]]),
        tf.sparse.from_dense(X),
    ],
    ids=["ragged", "sparse"],
)
def test_model_may_need_ragged_or_sparse_batches(ours, x):
    def run():
        keras.utils.set_random_seed(1)
        model = Composite()
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(4)
        logs = model.fit(data, shuffle=False, verbose=0).history
        return [*logs["loss"], *logs["mae"], *model.predict(data)[:, 0]]

    expected, found = run_twice(ours, run)
    assert found == pytest.approx(expected, 1e-5)
