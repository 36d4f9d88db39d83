"""Custom losses, metrics and steps compute the same as in one process."""

import functools
import random

import cases
import custom_steps
import keras
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_close
from local import assert_copies_agree, copies, per_replica
from one_process import TOLERANCE, assert_trains_alike, run_twice

from tf_optimizers._compat import patches
from tf_optimizers.workers.data.batch_metadata import (
    CountedSpec,
    RowCounts,
    with_rows,
)
from tf_optimizers.workers.steps.array_lengths import gains_a_row
from tf_optimizers.workers.steps.uneven_batches import weight_uneven_batches

RNG = np.random.default_rng(0)


# Other cases cover these in short runs.
LONG = [
    *("guide, steps", "guide, accumulated", "rows", "sum", "function"),
    *("synchronized, no reduction", "metrics, eager"),
    *("metrics", "no reduction, eager", "several optimizers"),
    *("guide, floats", "guide, eager", "compute_loss", "function within"),
    *("vector, eager", "vector, loss scale"),
    *("guide, ours", "average of TensorFlow", "distillation", "VAE"),
]


@pytest.mark.parametrize("name", cases.with_long(custom_steps.CASES, LONG))
def test_custom_steps_equal_one_process(ours, name):
    assert_trains_alike(ours, lambda: custom_steps.fit(name))


def test_functions_of_eager_steps_cannot_wait_for_other_devices(ours):
    """Without the error, they would wait forever."""
    with ours.scope():
        model = custom_steps.compiled(
            custom_steps.CallsFunction(),
            custom_steps.sgd(),
            run_eagerly=True,
        )
    with pytest.raises(RuntimeError, match="Pass `run_eagerly=False`"):
        model.fit(custom_steps.X, custom_steps.Y, verbose=0)


def histories(strategy, kind, *data, **kwargs):
    """Return what a model reports without a strategy, and under one."""

    def fit():
        keras.utils.set_random_seed(1)
        model = custom_steps.compiled(kind())
        return model.fit(*data, shuffle=False, verbose=0, **kwargs).history

    return run_twice(strategy, fit)


class ReturnsArrays(custom_steps.Guide):
    """Returns means of two columns, and of each row, and errors."""

    rows: int | None = None  # The only number of rows that it accepts.

    def train_step(self, data):
        x, y = data
        x = tf.ensure_shape(x, (self.rows, 4))
        error = (y - self(x)) ** 2
        return {
            "columns": keras.ops.mean(error, 0),
            "rows": keras.ops.mean(error, 1),
            "both": error,
            "flat": keras.ops.reshape(error, (-1,)),
            "twice": keras.ops.tile(keras.ops.mean(error, 0), (2,)),
            **super().train_step(data),
        }


@pytest.mark.parametrize("batch", cases.with_long([4, 6], [6]))
def test_arrays_with_elements_per_row_are_recognized(ours, batch):
    """With 4 rows, a replica has as many rows as columns."""
    x, y = (
        np.concatenate([part, part])[:12]
        for part in (custom_steps.X, custom_steps.Y)
    )
    expected, found = histories(
        *(ours, ReturnsArrays, x, y), batch_size=batch, epochs=2
    )
    assert np.shape(expected["columns"]) == (2, 2)
    assert np.shape(expected["rows"]) == (2, batch)
    assert np.shape(expected["flat"]) == (2, 2 * batch)
    for name, values in expected.items():
        assert np.shape(found[name]) == np.shape(values), name
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


class ReturnsIntegers(custom_steps.Guide):
    """Returns integers that differ between replicas, and some that do not."""

    def train_step(self, data):
        x, y = data
        rows = keras.ops.cast(103 * y[:, 0], "int32")
        logs = super().train_step(data)
        return logs | {
            "number": rows[0],
            "array": rows[:1] * tf.constant([1, 2]),
            "rows": rows,
            "flags": y[:, 0] > 0,
            "steps": self.optimizer.iterations,
            "large": tf.constant(2**40 + 1),
        }


def test_integers_are_averaged_as_floats(ours):
    """The replicas have two rows and one row."""
    x, y = (part[:3] for part in (custom_steps.X, custom_steps.Y))
    expected, found = histories(ours, ReturnsIntegers, x, y, batch_size=3)
    rows = np.array(expected["rows"][0])
    mean = (2 * rows[0] + rows[2]) / 3
    assert abs(mean - round(mean)) > 0.3
    np.testing.assert_allclose(found["number"], [mean], rtol=1e-6)
    np.testing.assert_allclose(found["array"], [[mean, 2 * mean]], rtol=1e-6)
    assert expected["large"] == [2**40 + 1]
    for name in ("rows", "flags", "steps", "large"):
        values = np.asarray(found[name], "float64")
        np.testing.assert_allclose(values, expected[name], rtol=1e-14)


class Halves(keras.metrics.Metric):
    """Returns the second half of a vector."""

    def __init__(self):
        super().__init__(name="halves")
        self.total = self.add_weight(shape=(4,), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        both = tf.concat([y_true, y_pred], 1)
        self.total.assign_add(tf.reduce_sum(both, 0))

    def result(self):
        return tf.split(self.total, 2)[1]


class ReturnsVectors(custom_steps.Guide):
    """Returns vectors of the same shape."""

    def __init__(self):
        super().__init__()
        self.halves = Halves()

    def train_step(self, data):
        x, y = data
        error = y - self(x)
        self.halves.update_state(y, error)
        logs = super().train_step(data)
        return logs | {
            "squares": tf.reduce_mean(error**2, 0),
            "sizes": tf.reduce_mean(tf.abs(error), 0),
            "halves": self.halves.result(),
        }

    @property
    def metrics(self):
        return [*super().metrics, self.halves]


def test_vectors_are_not_mixed_up(ours, optimized_graphs):
    """TensorFlow takes another output of an operation to stack with itself."""
    x, y = custom_steps.X, custom_steps.Y
    expected, found = histories(ours, ReturnsVectors, x, y, batch_size=3)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)


class Half(Halves):
    """Returns a number of Python's."""

    def result(self):
        return 0.5


def test_result_of_a_metric_may_be_a_python_number(ours):
    with ours.scope():
        model = ReturnsVectors()
        model.halves = Half()
        custom_steps.compiled(model)
    x, y = custom_steps.X, custom_steps.Y
    history = model.fit(x, y, batch_size=3, verbose=0).history
    assert history["halves"] == [0.5]


def test_array_that_may_have_an_element_for_each_row_is_named(ours):
    with ours.scope():
        model = custom_steps.compiled(ReturnsArrays())
    model.rows = 2
    x, y = (part[:4] for part in (custom_steps.X, custom_steps.Y))
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"`train_step` returns must") as error:
        model.fit(x, y, batch_size=4, verbose=0)
    assert "for 2 rows per replica" in str(error.value)
    assert "Return a number" in str(error.value)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


class Keeps(keras.metrics.Metric):
    """Keeps a maximum, which is not a sum over replicas."""

    def __init__(self):
        super().__init__(name="keeps")
        self.most = self.add_weight(initializer="zeros", name="most")
        self.rows = self.add_weight(initializer="zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))
        self.rows.assign_add(keras.ops.shape(y_pred)[0])

    def result(self):
        return self.most


def test_vector_that_may_have_an_element_for_each_row_is_named(ours):
    """Batches of a fixed size do not show whether two numbers are of rows."""
    x, y = custom_steps.X, custom_steps.Y
    loss = custom_steps.MeanOfColumns(reduction="sum")
    with ours.scope():
        model = custom_steps.compiled(
            custom_steps.dense(2), custom_steps.sgd(), loss
        )
    before = model.get_weights()
    with pytest.raises(ValueError, match="must have an element for each row"):
        model.train_on_batch(x[:4], y[:4])
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    expected = custom_steps.compiled(
        custom_steps.dense(2), custom_steps.sgd(), loss
    )
    expected.set_weights(before)
    for each in (model, expected):
        each.train_on_batch(x[:6], y[:6])
    assert_close(
        model.get_weights(), expected.get_weights(), rtol=1e-5, atol=1e-6
    )


def test_metric_variable_that_is_no_sum_is_named(ours):
    """Variables of Keras's metrics are sums, even if assigned otherwise."""
    with ours.scope():
        model = custom_steps.dense(2)
        metrics = [
            *(keras.metrics.AUC(), keras.metrics.MeanIoU(2)),
            keras.metrics.R2Score(),
        ]
        model.compile("sgd", "mse", metrics=metrics)
        model.test_on_batch(
            custom_steps.X, abs(custom_steps.Y) > 1
        )  # There is no warning.
        model.compile("sgd", "mse", metrics=[Keeps(), "mae"])
    with pytest.warns(UserWarning, match="must be a sum over rows") as warned:
        model.test_on_batch(custom_steps.X, custom_steps.Y)
    (message,) = {str(each.message) for each in warned}
    assert "`keeps/most`" in message


class Moving(keras.metrics.Metric):
    """The moving average of the batches' means, by two formulas."""

    def __init__(self):
        super().__init__(name="moving")
        self.mean = self.add_weight(initializer="zeros", name="mean")
        self.to = self.add_weight(initializer="zeros", name="to")
        self.less = self.add_weight(initializer="zeros", name="less")

    def update_state(self, y_true, y_pred, sample_weight=None):
        mean = keras.ops.mean(y_pred)
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        self.to.assign_add(0.1 * (mean - self.to))
        self.less.assign_sub(
            tf.cond(mean > 0, lambda: 0.1 * (self.less - mean), lambda: 0.0)
        )

    def result(self):
        return self.mean


def test_metric_variable_that_moves_by_its_own_value_is_named(ours):
    with ours.scope():
        model = custom_steps.dense(2)
        model.compile("sgd", "mse", metrics=[Moving()])
    with pytest.warns(UserWarning, match="must be a sum over rows") as warned:
        model.test_on_batch(custom_steps.X, custom_steps.Y)
    messages = {str(each.message) for each in warned}
    names = ("mean", "to", "less")
    assert len(messages) == len(names)
    assert all(any(f"`moving/{n}`" in m for m in messages) for n in names)


class InTensorFlow(keras.metrics.Metric):
    """Adds up values in a `tf.Variable`, which Keras does not track."""

    def __init__(self):
        super().__init__(name="in_tensorflow")
        self.total = tf.Variable(0.0, trainable=False)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(y_pred))

    def result(self):
        return self.total


class Rate(keras.metrics.Metric):
    """The learning rate, without any state."""

    def __init__(self, optimizer):
        super().__init__(name="rate")
        self.optimizer = optimizer

    def update_state(self, y_true, y_pred, sample_weight=None):
        pass

    def result(self):
        return self.optimizer.learning_rate


def test_metric_without_variables_of_keras_is_named(ours):
    with ours.scope():
        model = custom_steps.dense(2)
        optimizer = keras.optimizers.SGD(0.1)
        metrics = [InTensorFlow(), Rate(optimizer), "mae"]
        model.compile(optimizer, "mse", metrics=metrics)
    with pytest.warns(UserWarning, match="must have variables") as warned:
        model.test_on_batch(custom_steps.X, custom_steps.Y)
    (message,) = {str(each.message) for each in warned}
    assert "`in_tensorflow`, without such variables" in message


class OfBatches(keras.metrics.Metric):
    """The mean of the batches' means."""

    def __init__(self):
        super().__init__(name="of_batches")
        self.total = self.add_weight(initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.mean(y_pred))
        self.count.assign_add(1)

    def result(self):
        return self.total / self.count


def test_metric_that_counts_batches_is_named(ours):
    with ours.scope():
        model = custom_steps.dense(2)
        model.compile("sgd", "mse", metrics=[OfBatches()])
    with pytest.warns(UserWarning, match="must be a sum over rows") as warned:
        model.evaluate(custom_steps.X, custom_steps.Y, batch_size=3, verbose=0)
    (message,) = {str(each.message) for each in warned}
    assert "`of_batches/count`, to which a step adds a constant" in message


def test_number_made_of_a_metric_is_named(ours):
    """A number that is not a metric's result counts as one of a replica."""

    class Made(custom_steps.Guide):
        def test_step(self, data):
            x, y = data
            self.mae.update_state(y, self(x))
            return {"mae": self.mae.result(), "half": self.mae.result() / 2}

    with ours.scope():
        model = custom_steps.compiled(Made())
    with pytest.warns(UserWarning, match="must return a metric") as warned:
        model.evaluate(custom_steps.X, custom_steps.Y, batch_size=3, verbose=0)
    (message,) = {str(each.message) for each in warned}
    assert "Received: `half`, which depends on `mae/" in message


def test_outputs_without_names_are_described(ours):
    """Steps may return lists."""

    class Listed(custom_steps.Guide):
        def test_step(self, data):
            x, y = data
            self.mae.update_state(y, self(x))
            return [self.mae.result() / 2]

    with ours.scope():
        model = custom_steps.compiled(Listed())
    run = tf.function(lambda: ours.run(model.test_step, ((x, y),)))
    x, y = custom_steps.X[:4], custom_steps.Y[:4]
    with pytest.warns(UserWarning, match="Received: a value, which depends"):
        run()
    shape = tf.TensorShape([2])
    with pytest.raises(ValueError, match=r"Received: an array of shape \(2,\)"):
        gains_a_row("train_step", 2, None, shape, None, None)
    # An array of another length then counts as an array of fixed shape.
    longer = tf.TensorShape([4])
    assert not gains_a_row("train_step", 2, None, longer, None, None)


@pytest.mark.parametrize("eagerly", cases.with_long([False, True], [True]))
def test_metric_with_several_results_keeps_its_axis(ours, eagerly):
    """On several workers, Keras reduces results of a step along axis 0."""
    labels = keras.ops.one_hot([0, 1, 1, 2], 3)
    guesses = keras.ops.one_hot([0, 1, 2, 2], 3)
    with ours.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Identity()])
        model.compile(loss="mse", metrics=[keras.metrics.F1Score()])

    def run():
        logs = ours.run(model.test_step, ((guesses, labels),))
        return {k: ours.reduce("MEAN", log, axis=0) for k, log in logs.items()}

    logs = run() if eagerly else tf.function(run)()
    expected = keras.metrics.F1Score()(labels, guesses)
    assert logs["f1_score"].shape == (3,)
    assert cases.error([logs["f1_score"]], [expected]) < TOLERANCE


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="newer Keras"
)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_optimizer_is_built_the_same_on_all_replicas(ours, is_scaled):
    """A GAN's step is the first to use the optimizer of a part."""
    with ours.scope():
        variable = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.ScheduleFreeAdamW(0.1)
        if is_scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 1.0)

    @tf.function
    def step():
        ours.run(optimizer.apply, ([tf.ones(2)], [variable]))

    step()
    assert_copies_agree(ours, (variable, *optimizer.variables))
    assert copies(ours, optimizer.iterations) == [1, 1]


def test_optimizer_that_a_step_builds_is_built_as_by_keras(ours):
    """It has variables, even from an iterator, with Keras's names."""
    with ours.scope():
        variable = keras.Variable([1.0, 2.0], name="w")
        optimizer = keras.optimizers.Adam(0.1)
    tf.function(lambda: ours.run(optimizer.apply, ([], [])))()
    assert not optimizer.built

    def step():
        optimizer.apply([tf.ones(2)], iter([variable]))

    tf.function(lambda: ours.run(step))()
    assert variable.numpy()[0] < 0.95
    assert optimizer.variables[-1].path == f"{optimizer.name}/w_velocity"


class ScalesLoss(keras.Sequential):
    """Has a step for dynamic loss scaling; the loss is the mean of outputs."""

    scales = True  # False stands for a user who forgets it.

    def __init__(self):
        super().__init__([keras.Input((1,)), keras.layers.Dense(1)])

    def train_step(self, data):
        x = data[0]
        with tf.GradientTape() as tape:
            scaled = loss = keras.ops.mean(self(x))
            if self.scales:
                scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"loss": loss}


def test_scaled_loss_of_the_users_step_overflows_as_in_one_process(ours):
    """A replica's gradient alone is larger than its share of the sum."""

    def fit():
        model = ScalesLoss()
        model.compile(
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(1.0), initial_scale=2.0**127
            )
        )
        x = np.array([[2.4], [0.0]], "float32")  # 2.4 * 2^127 is infinite.
        before = model.get_weights()[0]
        model.fit(x, x, batch_size=2, verbose=0)
        return model.get_weights()[0] - before

    expected, found = run_twice(ours, fit)
    assert np.abs(expected) > 0.5
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def loss_and_gradients(model, data):
    """Return the mean squared error of a batch, and its gradients."""
    x, y = data
    with tf.GradientTape() as tape:
        loss = keras.ops.mean((y - model(x)) ** 2)
    return loss, tape.gradient(loss, model.trainable_weights)


class DropsGradient(keras.Sequential):
    """Passes one gradient too few, which Keras accepts with variables."""

    def train_step(self, data):
        loss, gradients = loss_and_gradients(self, data)
        self.optimizer.apply(gradients[:-1], self.trainable_weights)
        return {"loss": loss}


def test_each_variable_needs_a_gradient(ours):
    with ours.scope():
        model = DropsGradient([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd")
    before = model.get_weights()
    with pytest.raises(ValueError, match="Received: 1 gradients and 2 var"):
        model.fit(custom_steps.X, custom_steps.Y, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


class Accumulates(keras.Sequential):
    """Adds gradients to variables, and applies them after two batches."""

    def __init__(self):
        super().__init__([keras.Input((4,)), keras.layers.Dense(2)])
        self.sums = [tf.Variable(0 * weight) for weight in self.weights]
        self.count = tf.Variable(0)

    def train_step(self, data):
        self.count.assign_add(1)
        loss, gradients = loss_and_gradients(self, data)
        is_last = tf.cast(self.count % 2 == 0, tf.float32)
        for kept, gradient in zip(self.sums, gradients, strict=True):
            kept.assign_add(gradient)
        self.optimizer.apply(
            [is_last * kept / 2 for kept in self.sums], self.trainable_weights
        )
        for kept in self.sums:
            kept.assign((1 - is_last) * kept)
        return {"loss": loss}


class HasMomentum(keras.Sequential):
    """Passes its own momentum to an optimizer."""

    def __init__(self):
        super().__init__([keras.Input((4,)), keras.layers.Dense(2)])
        self.momentums = [
            keras.Variable(0 * weight, trainable=False)
            for weight in self.weights
        ]

    def train_step(self, data):
        loss, gradients = loss_and_gradients(self, data)
        for momentum, gradient in zip(self.momentums, gradients, strict=True):
            momentum.assign(0.9 * momentum + gradient)
        self.optimizer.apply(self.momentums, self.trainable_weights)
        return {"loss": loss}


@pytest.mark.parametrize("kind", [Accumulates, HasMomentum])
def test_gradients_kept_in_variables_need_even_batches(ours, kind):
    x, y = custom_steps.X, custom_steps.Y

    def fit(rows, batch):
        keras.utils.set_random_seed(1)
        model = custom_steps.compiled(kind())
        model.fit(
            x[:rows], y[:rows], batch_size=batch, shuffle=False, verbose=0
        )
        return [weight.numpy() for weight in model.trainable_weights]

    expected, found = run_twice(ours, lambda: fit(6, 4))
    assert cases.error(found, expected) < TOLERANCE
    with (
        ours.scope(),
        pytest.raises(
            tf.errors.InvalidArgumentError, match="split evenly among replicas"
        ),
    ):
        fit(7, 4)


class Seen(keras.optimizers.SGD):
    """Records a kernel's gradients on replicas, and their sum."""

    def __init__(self):
        super().__init__(1.0)
        self.on_replicas, self.sums = [], []

    def apply(self, grads, trainable_variables=None):
        self.on_replicas.append(float(tf.squeeze(grads[0])))
        super().apply(grads, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        if len(variable.shape) == 2:
            self.sums.append(float(tf.squeeze(gradient)))
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize("scales", [True, False])
def test_optimizer_in_loss_scaling_gets_gradients_weighted_once(ours, scales):
    """The replicas have the rows 1 and 2, and the row 6."""
    with ours.scope():
        model, optimizer = ScalesLoss(), Seen()
        model.compile(
            keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0),
            run_eagerly=True,
        )
    model.scales = scales
    x = np.array([[1.0], [2.0], [6.0]], "float32")
    model.train_on_batch(x, x)
    # The optimizer divides by the scale, whether or not the loss was scaled.
    factor = 1 if scales else 1 / 2
    assert sorted(optimizer.on_replicas) == [factor, 2 * factor]
    assert optimizer.sums == [3 * factor] * 2


def test_step_hooks_need_their_names(monkeypatch):
    monkeypatch.setattr(patches, "NAMES", {})
    with pytest.raises(KeyError, match="scale_loss_for_distribution"):
        weight_uneven_batches.__wrapped__()


OTHER_ROWS = {
    "twice": lambda x: {"twice": keras.ops.concatenate([x, -x])},
    "transposed": keras.ops.transpose,
    "mean": lambda x: [x, keras.ops.mean(x)],
}


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("name", OTHER_ROWS)
def test_predictions_without_an_element_per_row_are_rejected(ours, name, rows):
    """Their order would depend on the replicas. With 4 rows, all have 2."""

    class Predicts(keras.Model):
        def call(self, x):
            return OTHER_ROWS[name](x)

    with ours.scope():
        model = Predicts()
    kinds = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(kinds, match="must have a row for each row of"):
        model.predict_on_batch(custom_steps.X[:rows])


def test_batch_is_split_if_predict_is_wrapped(ours, monkeypatch):
    """Packages that log calls wrap methods of `keras.Model`."""
    predict = keras.Model.predict
    wrapped = lambda *args, **kwargs: predict(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(keras.Model, "predict", wrapped)
    with ours.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert model.predict_on_batch(np.ones((4, 3))).shape == (4, 2)


def test_predictions_are_those_of_the_rows(ours):
    expected, found = run_twice(ours, custom_steps.predictions)
    assert found == expected


def counted(strategy, batch, other=None):
    """Return a batch of which the second replica has no row.

    It holds a copy of the first row instead, or another row.
    """

    def parts(tensor, other):
        return per_replica(strategy, lambda rank: other if rank else tensor)

    rows = tf.shape(batch[0])[0]
    others = other or [tensor[:1] for tensor in batch]
    parts = tuple(map(parts, batch, others))
    kinds = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in batch]
    spec = tuple(CountedSpec(kind, kind) for kind in kinds)
    return with_rows(parts, RowCounts(rows, (rows, tf.constant(0))), spec)


def make_telling(reduction, *, synchronized):
    """Return a model in which every part would reveal the extra row."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4, 3))
    x = keras.layers.Masking()(inputs)
    x = keras.layers.BatchNormalization(synchronized=synchronized)(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.MeanSquaredError(reduction),
        metrics=["mae", keras.metrics.AUC(name="auc"), custom_steps.Total()],
    )
    return model


@pytest.mark.parametrize(
    ("reduction", "synchronized"),
    cases.with_long(
        [
            *(("mean", False), ("sum", False), ("none", False)),
            ("mean_with_sample_weight", True),
        ],
        [("mean", False), ("sum", False), ("none", False)],
    ),
)
def test_padding_row_does_not_count(ours, reduction, synchronized):
    batch = [
        RNG.standard_normal((3, 4, 3)).astype("float32"),
        RNG.integers(0, 2, (3, 4, 2)).astype("float32"),
        np.array([[0.5], [1], [2]], "float32"),
    ]
    batch[0][0, 2:] = 0  # Some steps are masked.
    batch = [tf.constant(values) for values in batch]
    expected, actual = run_twice(
        ours, lambda: make_telling(reduction, synchronized=synchronized)
    )
    step, test = map(tf.function, (expected.train_step, expected.test_step))
    logs = [step(batch), test(batch)]

    def run(batch, name):
        outputs = ours.run(getattr(actual, name), (batch,))
        return {k: ours.reduce("MEAN", v, None) for k, v in outputs.items()}

    train, evaluate = (
        tf.function(functools.partial(run, name=name))
        for name in ("train_step", "test_step")
    )
    batch = counted(ours, batch)
    found = [train(batch), evaluate(batch)]
    # Of replica 0; the other one keeps its statistics.
    assert cases.error(actual.get_weights(), expected.get_weights()) < TOLERANCE
    for log, expected_log in zip(found, logs, strict=True):
        for name, value in expected_log.items():
            assert cases.error([log[name]], [value]) < 1e-5, name
    if not synchronized:
        moving = actual.non_trainable_variables[0].value.values[1]
        np.testing.assert_array_equal(moving, np.zeros(3))


@pytest.mark.parametrize("step", [keras.Sequential, custom_steps.Guide])
def test_gradient_of_a_padding_row_may_be_nan(ours, step):
    """Like the gradient of a square root at zero."""

    class Root(step):
        def compute_loss(self, x, y, y_pred, *_, **__):
            return self.loss_of(y, y_pred)

        def loss_of(self, y, y_pred):
            return keras.ops.mean(keras.ops.norm(y_pred - y, axis=1))

    with ours.scope():
        layers = [keras.Input((2,)), keras.layers.Dense(2)]
        model = Root(layers) if step is keras.Sequential else Root()
        model.compile(keras.optimizers.SGD(0.1))
    units = model.layers[0].kernel.shape[0]
    ones, zeros = (
        [make([1, units]), make([1, 2])] for make in (tf.ones, tf.zeros)
    )
    batch = counted(ours, ones, zeros)
    before = model.get_weights()
    ours.run(model.train_step, (batch,))
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert cases.error(model.get_weights()[:1], before[:1]) > 1e-2


def test_custom_loop_gets_no_padding_row(ours):
    batch = counted(ours, [tf.ones([3, 4]), tf.constant(["a", "b", "c"])])

    @tf.function
    def run(batch, other):
        return ours.run(
            lambda batch, *, other: (
                [tf.size(tensor) for tensor in batch] + [tf.size(other)]
            ),
            (batch,),
            {"other": other},
        )

    sizes = run(batch, tf.constant([7]))
    sizes = [ours.experimental_local_results(size) for size in sizes]
    np.testing.assert_array_equal(sizes, [[12, 0], [3, 0], [1, 1]])


DTYPES = [
    *("bool", "uint8", "int8", "int16", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "int64", "complex64", "complex128", "string"),
]


@pytest.mark.parametrize("dtype", cases.with_long(DTYPES, DTYPES[1:-1]))
def test_values_of_any_dtype_are_joined(ours, dtype):
    """One replica has two rows, the other one."""
    numbers = tf.constant([[0, 1], [2, 3], [100, 0]])
    if dtype == "string":
        rows = tf.strings.as_string(numbers) + tf.constant([["", "\u00e9\0."]])
    else:
        rows = tf.cast(numbers, dtype)
    if rows.dtype.is_complex:
        rows *= 1 + 2j
    parts = per_replica(ours, lambda rank: rows[2:] if rank else rows[:2])
    joined = [ours.gather(parts, 0), tf.function(ours.gather)(parts, 0)]
    for value in joined:
        assert value.dtype == rows.dtype
        assert value.numpy().tolist() == rows.numpy().tolist()


def test_strings_of_a_replica_without_any_are_joined(ours):
    strings = [tf.constant(["a", ""]), tf.zeros([0], tf.string)]
    parts = per_replica(ours, strings.__getitem__)
    assert ours.gather(parts, 0).numpy().tolist() == [b"a", b""]


class Perplexity(keras.metrics.Metric):
    """Adds up losses of a `Loss` and numbers of elements, as KerasHub does."""

    def __init__(self, loss):
        super().__init__(name="perplexity")
        self.loss = loss
        self.total = self.add_weight(initializer="zeros")
        self.count = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        weights = keras.ops.cast(y_true[:, 0] > 0, "float32")
        loss, count = self.loss(y_true, y_pred, weights), keras.ops.sum(weights)
        is_sum = self.loss.reduction == "sum"
        self.total.assign_add(loss if is_sum else loss * count)
        self.count.assign_add(count)

    def result(self):
        return keras.ops.exp(self.total / self.count)


class Tracker(keras.metrics.Metric):
    """Updates a `Mean` by a sum of losses."""

    def __init__(self):
        super().__init__(name="tracker")
        self.loss = keras.losses.MeanSquaredError("sum")
        self.mean = keras.metrics.Mean()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.mean.update_state(self.loss(y_true, y_pred))

    def result(self):
        return self.mean.result()


@pytest.mark.parametrize("eager", [False, True])
def test_metrics_add_up_losses_as_one_process(ours, eager):
    x, y = custom_steps.X, custom_steps.Y

    def train():
        keras.utils.set_random_seed(1)
        model = custom_steps.dense(2)
        reductions = "sum", "mean_with_sample_weight"
        losses = [keras.losses.MeanSquaredError(each) for each in reductions]
        metrics = [*map(Perplexity, losses), Tracker()]
        model.compile("sgd", "mse", metrics=metrics, run_eagerly=eager)
        arguments = {"batch_size": 3, "verbose": 0}
        history = model.fit(x, y, shuffle=False, **arguments).history
        return [*history.values(), *model.evaluate(x, y, **arguments)]

    expected, found = run_twice(ours, train)
    np.testing.assert_allclose(
        np.ravel(np.hstack(found)), np.ravel(np.hstack(expected)), rtol=1e-5
    )


class Noisy(custom_steps.Guide):
    """Draws random numbers without a seed."""

    def loss_of(self, y, y_pred):
        noise = keras.random.normal(keras.ops.shape(y))
        noise += keras.random.uniform(keras.ops.shape(y))
        noise += tf.cond(noise[0, 0] < 9, self.draw, self.draw)
        return super().loss_of(y, y_pred) + keras.ops.mean(noise)

    def draw(self):
        return keras.random.normal((1,))


@pytest.mark.parametrize("eager", [False, True])
def test_steps_may_draw_random_numbers_without_a_seed(ours, eager):
    """The draws go on from one step, and from one `fit`, to the next."""
    x = np.ones((4, 4), "float32")
    with ours.scope():
        model = Noisy()
        model.compile(keras.optimizers.SGD(0.0), run_eagerly=eager)
    state, losses = random.getstate(), []
    for _ in range(2):
        model.fit(x[:2], x[:2, :2], epochs=2, verbose=0)
        losses += model.history.history["loss"]
        if losses[2:]:
            assert random.getstate() == state
        state = random.getstate()
    assert len(set(losses)) == 4
