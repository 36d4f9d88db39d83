"""Replicas with different numbers of rows compute the same as one process."""

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from local import assert_copies_agree, copies, per_replica
from one_process import TOLERANCE, assert_trains_alike

RNG = np.random.default_rng(0)
X = RNG.standard_normal((7, 4, 3)).astype("float32")
X[:, 2:] *= RNG.integers(0, 2, (7, 2, 1))  # Time steps of zeros are masked.
Y = RNG.standard_normal((7, 4, 2)).astype("float32")
WEIGHT = np.linspace(0.2, 3, 7, dtype="float32")[:, np.newaxis]


class Penalized(keras.layers.Dense):
    """Adds a mean over rows to the loss, which is NaN without any."""

    def call(self, inputs):
        outputs = super().call(inputs)
        self.add_loss(keras.ops.mean(outputs**2))
        return outputs


def make_model(*, masked=False, normalized=False, outputs=1):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4, 3))
    x = keras.layers.Masking()(inputs) if masked else inputs
    x = Penalized(5, kernel_regularizer="l2")(x)
    if normalized:
        is_common = normalized == "synchronized"
        x = keras.layers.BatchNormalization(synchronized=is_common)(x)
    heads = [keras.layers.Dense(2, name=f"out{i}")(x) for i in range(outputs)]
    return keras.Model(inputs, heads if outputs > 1 else heads[0])


def fit(
    reduction="sum_over_batch_size",
    loss=None,
    weight=None,
    batch_size=3,
    optimizer="sgd",
    model=None,
    **compile_arguments,
):
    """Train on batches of 3, 3 and 1 rows: one replica gets no last row."""
    model = make_model(**model or {})
    optimizer = {"class_name": optimizer, "config": {"learning_rate": 0.1}}
    loss = loss or keras.losses.MeanSquaredError(reduction)
    metrics, targets = ["mae"], Y
    if len(model.outputs) > 1:
        loss, metrics, targets = [loss] * 2, [["mae"]] * 2, [Y] * 2
    model.compile(
        keras.optimizers.get(optimizer),
        loss,
        metrics=metrics,
        **compile_arguments,
    )
    data = (X, targets)
    options = {"sample_weight": weight, "batch_size": batch_size}
    history = model.fit(*data, shuffle=False, verbose=0, **options)
    evaluated = model.evaluate(*data, verbose=0, **options)
    return model, [*history.history.values(), np.ravel(evaluated)]


def averaged_by_the_user(targets, outputs):
    return keras.ops.mean((targets - outputs) ** 2)


class OneNumber(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return averaged_by_the_user(y_true, y_pred)


CASES = {
    "one number": {"loss": averaged_by_the_user},
    "one number, weighted": {"loss": OneNumber(), "weight": WEIGHT},
    "one number, summed": {
        "loss": OneNumber(reduction="sum"),
        "weight": WEIGHT / 10,
    },
    "one number, masked": {
        "loss": OneNumber(),
        "model": {"masked": True},
        "weight": WEIGHT,
    },
    "one number, masked by weight": {
        "loss": OneNumber(reduction="mean_with_sample_weight"),
        "model": {"masked": True},
        "weight": WEIGHT,
    },
    "sum": {"reduction": "sum", "optimizer": "adam"},
    "weighted, several steps": {"weight": WEIGHT, "steps_per_execution": 2},
    "by weight": {"weight": WEIGHT, "reduction": "mean_with_sample_weight"},
    "masked and weighted": {"model": {"masked": True}, "weight": WEIGHT},
    "masked by weight": {
        "model": {"masked": True},
        "weight": WEIGHT,
        "reduction": "mean_with_sample_weight",
    },
    "outputs": {"model": {"outputs": 2}, "loss_weights": [1.0, 0.5]},
    "even but masked": {"model": {"masked": True}, "batch_size": 4},
    "masked, synchronized": {
        "model": {"masked": True, "normalized": "synchronized"}
    },
    "eager": {"run_eagerly": True},
}


# Other cases cover these in short runs.
LONG = [
    *("masked by weight", "outputs", "even but masked"),
    *("sum", "weighted, several steps", "by weight"),
    *("one number, summed", "one number, masked by weight"),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.long] * (name in LONG))
        for name, case in CASES.items()
    ],
)
def test_uneven_batches_equal_one_process(ours, case):
    expected = assert_trains_alike(ours, lambda: fit(**case))
    start = make_model(**case.get("model", {})).get_weights()
    assert cases.error(start, expected.get_weights()) > 1e-2


@pytest.fixture
def in_float64():
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


def test_shares_of_rows_are_exact_in_float64(ours, in_float64):
    """In float32, a share such as 1/3 has an error of 1e-8."""
    expected, _ = fit("sum")
    with ours.scope():
        actual, _ = fit("sum")
    error = cases.error(actual.get_weights(), expected.get_weights())
    assert error < 1e-13


def test_replica_without_rows_keeps_its_statistics(ours):
    with ours.scope():
        model, logs = fit(model={"normalized": True})
    assert np.isfinite(np.concatenate(logs)).all()
    assert all(np.isfinite(w).all() for w in model.get_weights())
    mean = next(w for w in model.weights if "moving_mean" in w.path)
    found = []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: found.append(copies(ours, mean))
    )
    model.fit(X, Y, batch_size=3, shuffle=False, verbose=0, callbacks=[keep])
    # One replica has three batches, the other two; the end averages them.
    _, (before, others), (after, same) = found
    assert np.abs(after - before).max() > 1e-4
    np.testing.assert_allclose(same, others, rtol=1e-6)
    common, _ = copies(ours, mean)
    np.testing.assert_allclose(common, (after + same) / 2, rtol=1e-6)
    assert_copies_agree(ours, [mean])


def test_eager_masks_on_several_devices_are_rejected(ours):
    with ours.scope(), pytest.raises(RuntimeError, match="run_eagerly=False"):
        fit(model={"masked": True}, run_eagerly=True)


def test_loss_of_a_loop_is_weighted_by_rows(ours):
    """In TensorFlow's trace, rows are known only within the loss."""
    loss = keras.losses.MeanSquaredError()

    def train(model, run):
        optimizer = keras.optimizers.SGD(0.1)

        @tf.function(reduce_retracing=True)
        def step(x, y):
            with tf.GradientTape() as tape:
                value = loss(y, model(x))
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(value, variables), variables)

        for i in (0, 3, 6):
            run(step, X[i : i + 3], Y[i : i + 3])
        return model

    def run(step, *batch):
        parts = [[part[:2] for part in batch], [part[2:] for part in batch]]
        shared = (
            per_replica(ours, lambda rank, i=i: parts[rank][i])
            for i in range(2)
        )
        ours.run(step, tuple(shared))

    expected = train(make_model(), lambda step, *batch: step(*batch))
    with ours.scope():
        actual = train(make_model(), run)
    assert cases.error(actual.weights, expected.weights) < TOLERANCE


def test_batches_of_a_loop_have_one_type(ours):
    """A step traced for the rows of one replica would differ from others."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(3)
    data = ours.experimental_distribute_dataset(data)
    traced = []

    @tf.function
    def step(batch):
        traced.append(batch)
        x, _ = batch
        return ours.reduce("SUM", ours.run(tf.reduce_sum, (x,)), axis=None)

    total = sum(step(batch) for batch in data)
    np.testing.assert_allclose(total, X.sum(), rtol=1e-5)
    assert len(traced) == 1
    iterator = iter(data)
    optional = iterator.get_next_as_optional()
    for batch in (next(iterator), optional.get_value()):
        types = tf.nest.map_structure(tf.type_spec_from_value, batch)
        assert types == data.element_spec
