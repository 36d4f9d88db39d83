"""Custom loops count the same rows as one process."""

import contextlib

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from local import copies, per_replica
from one_process import TOLERANCE, assert_trains_alike

import tf_optimizers as tfo

RNG = np.random.default_rng(0)
X = RNG.standard_normal((9, 3)).astype("float32")
Y = RNG.integers(0, 4, 9)


def batches(*parts, size=4, drop_remainder=False):
    """Return batches of four, four and one row; one replica gets none."""
    data = tf.data.Dataset.from_tensor_slices(parts)
    return data.batch(size, drop_remainder)


ARGUMENTS = {
    "one by one": lambda x, y: ((x, y), None),
    "nested": lambda x, y: (((y, x),), None),
    "by name": lambda x, y: ((x,), {"y": y}),
    "apart": lambda x, y: (({"x": x}, [y]), None),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_tensor_of_a_batch_has_the_rows_of_the_replica(ours, name):
    def rows(*args, **kwargs):
        return [tf.shape(part)[0] for part in tf.nest.flatten((args, kwargs))]

    def total(counts):
        return [ours.reduce("SUM", count, None) for count in counts]

    @tf.function
    def count(x, y):
        return total(ours.run(rows, *ARGUMENTS[name](x, y)))

    data = ours.experimental_distribute_dataset(batches(X, Y))
    eagerly = [total(ours.run(rows, *ARGUMENTS[name](*b))) for b in data]
    traced = [count(*batch) for batch in data]
    assert np.sum(eagerly, 0).tolist() == np.sum(traced, 0).tolist() == [9, 9]


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data")
@pytest.mark.parametrize("is_drawn_inside", [False, True])
def test_data_that_end_early_on_a_replica_add_no_rows(ours, is_drawn_inside):
    """With 3 elements on 2 replicas, one lacks the last; sizes are fixed."""
    data = ours.distribute_datasets_from_function(
        lambda _: batches(X, Y, size=3, drop_remainder=True)
    )

    def rows(x, y):
        return tf.stack([tf.shape(x)[0], tf.shape(y)[0]])

    def step(x, y):
        return ours.reduce("SUM", ours.run(rows, (x, y)), None)

    if is_drawn_inside:

        @tf.function
        def epoch():
            total = tf.zeros([2], tf.int32)
            for batch in data:
                total += step(*batch)
            return total

        assert epoch().numpy().tolist() == [9, 9]
    else:
        step = tf.function(step)
        assert sum(step(*batch) for batch in data).numpy().tolist() == [9, 9]


@pytest.mark.parametrize("is_own", [False, True])
def test_fixed_sizes_stay_known(ours, is_own):
    """Layers that need the batch size rely on them."""
    seen = []

    @tf.function
    def step(x, y):
        ours.run(
            lambda *parts: seen.append([p.shape[0] for p in parts]), (x, y)
        )

    if is_own:
        data = ours.distribute_datasets_from_function(
            lambda _: batches(X, Y, size=2, drop_remainder=True)
        )
    else:
        data = ours.experimental_distribute_dataset(
            batches(X, Y, drop_remainder=True)
        )
    for batch in data:
        step(*batch)
    assert seen == [[2, 2], [2, 2]]


@pytest.mark.parametrize("name", ["train_step", "test_step"])
def test_fixed_sizes_stay_known_in_a_models_step(ours, name):
    seen = []

    class Model(keras.Sequential):
        """Records the number of rows that it is traced with."""

        def call(self, x):
            seen.append(x.shape[0])
            return super().call(x)

    with ours.scope():
        model = Model([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    data = batches(X, Y, drop_remainder=True)
    seen.clear()
    if name == "train_step":
        model.fit(data, shuffle=False, verbose=0)
    else:
        model.evaluate(data, verbose=0)
    assert set(seen[-2:]) == {2}


def classifier():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])


def per_row(model, x, y):
    return keras.losses.sparse_categorical_crossentropy(
        y, model(x), from_logits=True
    )


def step_of(model, optimizer, average):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = average(per_row(model, x, y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


LOOPS = ["function around", "function inside", "loss in a function", "eager"]


def trained(name, run, batches):
    """Return a model after training in a loop, and its losses."""
    model = classifier()
    average = tf.nn.compute_average_loss
    if name == "loss in a function":
        average = tf.function(average, reduce_retracing=True)
    step = step_of(model, keras.optimizers.SGD(0.5), average)
    if name == "function inside":
        step = tf.function(step)

    def call(*batch):
        return run(step, batch)

    if name in ("function around", "loss in a function"):
        call = tf.function(call)
    return model, [float(call(*batch)) for batch in batches]


@pytest.mark.parametrize("name", LOOPS)
def test_average_by_tensorflow_is_over_all_rows(ours, name):
    def sum_of(function, args):
        return ours.reduce("SUM", ours.run(function, args), None)

    expected, losses = trained(name, lambda f, args: f(*args), batches(X, Y))
    data = ours.experimental_distribute_dataset(batches(X, Y))
    with ours.scope():
        actual, found = trained(name, sum_of, data)
    assert cases.error(expected.weights[:1], classifier().weights[:1]) > 1e-2
    assert cases.error(actual.weights, expected.weights) < TOLERANCE
    assert cases.error(found, losses) < TOLERANCE


@pytest.mark.parametrize("sizes", [(9, 5), (8, 7)])
def test_average_is_that_of_each_of_two_batches(ours, sizes):
    """A step gets data of two datasets, with different numbers of rows.

    The first replica may have four rows of each.
    """
    losses = [RNG.random(size).astype("float32") for size in sizes]
    shared = [
        ours.experimental_distribute_dataset(batches(part, size=9))
        for part in losses
    ]

    def step(x, y):
        return [tf.nn.compute_average_loss(part) for part in (x, y)]

    @tf.function
    def run(x, y):
        found = ours.run(step, (x, y))
        return [ours.reduce("SUM", value, None) for value in found]

    ((first,), (second,)) = (next(iter(data)) for data in shared)
    expected = [part.mean() for part in losses]
    np.testing.assert_allclose(run(first, second), expected, rtol=1e-6)
    if sizes == (9, 5):
        found = run.python_function(first, second)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        return
    with pytest.raises(RuntimeError, match="cannot run eagerly"):
        run.python_function(first, second)


@pytest.mark.parametrize("has_batch", [False, True])
def test_average_of_other_values_is_that_of_all(ours, has_batch):
    """Replicas may have different values, or the same."""
    parts = [tf.constant([1.0, 2.0]), tf.constant([6.0])]
    values = per_replica(ours, parts.__getitem__)
    run = tf.function(
        lambda *args: ours.reduce(
            "SUM", ours.run(tf.nn.compute_average_loss, args), None
        )
    )
    if has_batch:
        assert float(run(parts[0])) == 1.5
    else:
        assert float(run(values)) == 3.0


def emptied(data):
    """Return batches; one is empty, and one has a single row."""

    def keep(x, y, number):
        kept = (number < 3) | (number == 7) | (number > 8)
        return tf.boolean_mask(x, kept), tf.boolean_mask(y, kept)

    return data.map(keep)


def fit_emptied():
    x = np.concatenate([X, -X[:3]])
    data = batches(x, x[:, :1] ** 2, np.arange(12), size=3)
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(3, kernel_regularizer="l2"),
            keras.layers.Dense(1),
        ]
    )
    # This optimizer moves weights even in a step without rows.
    optimizer = keras.optimizers.Adam(0.1)
    model.compile(optimizer, "mse", metrics=["mae"])
    history = model.fit(emptied(data), epochs=2, shuffle=False, verbose=0)
    evaluated = model.evaluate(emptied(data), verbose=0)
    predicted = model.predict(emptied(data).map(lambda x, y: x), verbose=0)
    assert predicted.shape == (7, 1)
    return model, [*history.history.values(), evaluated, predicted]


def test_batches_without_rows_are_those_of_one_process(ours):
    """`filter`, or a mask, may leave such batches."""
    assert_trains_alike(ours, fit_emptied)


def test_batch_without_rows_has_none_in_a_loop(ours):
    data = emptied(batches(X, Y, np.arange(9), size=3))
    data = ours.experimental_distribute_dataset(data)
    step = tf.function(
        lambda batch: ours.reduce(
            "SUM", ours.run(lambda x, y: tf.shape(y)[0], batch), None
        )
    )
    assert [int(step(batch)) for batch in data] == [3, 0, 1]


def test_class_weight_of_distributed_data_is_rejected(ours):
    with ours.scope():
        model = classifier()
        model.compile("sgd", "sparse_categorical_crossentropy")
    data = ours.experimental_distribute_dataset(batches(X, Y))
    with pytest.raises(ValueError, match="weights as the third element"):
        model.fit(data, class_weight={0: 2.0}, shuffle=False)


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("replicas", ["ours", "of_one_replica"])
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize(
    "around", [lambda inner: inner, keras.optimizers.LossScaleOptimizer]
)
def test_step_outside_of_run_names_the_remedy(
    request, replicas, is_inside, is_built, around
):
    """TensorFlow's errors are about indices, or about the scope.

    With an optimizer that is built, each worker would train alone.
    """
    strategy = request.getfixturevalue(replicas)
    outside = around(keras.optimizers.Adam())
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
        inside = around(keras.optimizers.Adam())
        optimizer = inside if is_inside else outside
        if is_built:
            optimizer.build([variable])
    scopes = [strategy.scope()]
    if not is_built or strategy.num_replicas_in_sync > 1:
        scopes.append(contextlib.nullcontext())
    for scope in scopes:
        with (
            scope,
            pytest.raises(RuntimeError, match="must run in `strategy.run`"),
        ):
            optimizer.apply([tf.ones([2])], [variable])
    np.testing.assert_array_equal(variable, [1.0, 2.0])


def test_first_step_in_a_graph_builds_a_scaled_optimizer(ours):
    with ours.scope():
        variable = keras.Variable([1.0, 2.0])
        local = tfo.SparseLoCo(keras.optimizers.SGD(0.25), sync_every=2)
        optimizer = keras.optimizers.LossScaleOptimizer(local, 1.0)

    @tf.function
    def step():
        ours.run(lambda: optimizer.apply([tf.fill([2], 0.5)], [variable]))

    step()
    assert not local.is_synchronized
    step()
    np.testing.assert_array_equal(copies(ours, variable), [[0.5, 1.5]] * 2)


def test_integers_of_metrics_keep_their_sum_outside_of_steps(ours):
    """TensorFlow divides a sum by the replicas, and drops the remainder."""

    def results():
        metric = keras.metrics.MeanIoU(2)
        found = []
        for i in range(3):
            metric.update_state([0, 1, 1], [0, 1, i % 2])
            found.append(float(metric.result()))
        return [*found, np.array(metric.total_cm).tolist()]

    expected = results()
    with ours.scope():
        found = results()
    assert found == expected
