"""`ShardedState` with custom optimizers and custom steps."""

import functools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_close
from local import assert_copies_agree
from scripts.sharded import Counted

import tf_optimizers as tfo

SHAPES = [(6, 8), (8,), (8, 3), (3,)]


def variables_of(strategy, shapes=SHAPES):
    random = np.random.default_rng(0)
    with strategy.scope():
        return [
            keras.Variable(
                random.normal(size=shape), dtype="float32", name=f"v{i}"
            )
            for i, shape in enumerate(shapes)
        ]


def stepped(strategy, make, order=(0, 1, 2, 3), is_built=True, steps=3):
    """Return variables and optimizer after steps with an N-th per replica.

    Args:
        strategy: The strategy.
        make: Creates the optimizer.
        order: The variable of each gradient.
        is_built: Whether the optimizer is built before the steps.
        steps: Number of steps.
    """
    variables = variables_of(strategy)
    random = np.random.default_rng(1)
    with strategy.scope():
        optimizer = make()
        if is_built:
            optimizer.build(variables)
    gradients = [
        (random.normal(size=SHAPES[i]) / strategy.num_replicas_in_sync).astype(
            "float32"
        )
        for i in order
    ]

    def step():
        optimizer.apply(
            list(map(tf.constant, gradients)), [variables[i] for i in order]
        )

    run = tf.function(functools.partial(strategy.run, step))
    for _ in range(steps):
        run()
    assert_copies_agree(strategy, variables)
    return variables, optimizer


def assert_alike(found, expected, state=True):
    (mine, own), (theirs, other) = found, expected
    if state:
        mine, theirs = [*mine, *own.variables], [*theirs, *other.variables]
    for one, two in zip(mine, theirs, strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_allclose(
            one.numpy(), two.numpy(), rtol=0, atol=1e-6, err_msg=one.path
        )


class Copied(keras.optimizers.Adam):
    """Creates slots in a loop over a copy of the variables."""

    def build(self, variables):
        super().build(list(variables))


class Reversed(keras.optimizers.Optimizer):
    """Creates slots in other orders, in two nested loops."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        pairs = zip(variables, reversed(list(variables)), strict=True)
        slots = [self.add_variable_from_reference(v, "m") for _, v in pairs]
        self.means = slots[::-1]
        self.sums = [
            self.add_variable_from_reference(self._trainable_variables[i], "s")
            for i in range(len(variables))
        ]

    def update_step(self, gradient, variable, learning_rate):
        place = self._get_variable_index(variable)
        mean, total = self.means[place], self.sums[place]
        self.assign(mean, 0.9 * mean + gradient)
        self.assign_add(total, gradient**2)
        rate = tf.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * mean / (0.1 + tf.sqrt(total)))


OWN = {"copied": Copied, "reversed": Reversed, "counted": Counted}


@pytest.mark.parametrize("name", OWN)
def test_slots_belong_to_the_variable_that_they_are_made_from(mirrored, name):
    make = functools.partial(OWN[name], 0.1)
    found = stepped(mirrored, lambda: tfo.ShardedState(make()))
    assert_alike(found, stepped(mirrored, make))
    summary = found[1].memory_summary()
    assert min(summary["owned"]) > 0.3 * sum(summary["owned"])
    # The learning rate and the number of steps.
    assert summary["shared"] == 12


class ByIndex(Counted):
    """Creates slots that cannot be assigned to a variable."""

    kind = "float32"
    shape_of = staticmethod(lambda variable: variable.shape)

    def add_counts(self, variables):
        return [
            self.add_variable(
                self.shape_of(variables[i]), dtype=self.kind, name=f"count_{i}"
            )
            for i in range(len(variables))
        ]


class Scalars(ByIndex):
    shape_of = staticmethod(lambda variable: ())


class Flags(Counted):
    kind = "bool"


class Others(Counted):
    """Creates state of each variable, but uses that of another one."""

    def build(self, variables):
        super().build(variables)
        self.means = self.means[1:] + self.means[:1]

    def count(self, place):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            ByIndex,
            r"count_0 of shape \(6, 8\), the shape of a variable",
        ),
        (Scalars, "belongs to another"),
        (Flags, "of dtype bool"),
        (Others, "uses another variable.s state"),
    ],
)
def test_state_of_no_variable_is_rejected(mirrored, make, message):
    with pytest.raises(ValueError, match=message):
        stepped(mirrored, lambda: tfo.ShardedState(make(0.1)))


TWICE = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "AdamW": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "clipped": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
    "clipped together": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "Nadam": lambda: keras.optimizers.Nadam(0.1),
    "Lamb": lambda: tfo.Lamb(0.1),
    "AdamOffload": lambda: tfo.AdamOffload(0.1),
}


@pytest.mark.parametrize(
    "name",
    cases.with_long(TWICE, set(TWICE) - {"clipped together", "Lamb"}),
)
def test_a_variable_may_have_two_gradients(mirrored, name):
    """This happens if two losses share an encoder."""
    order = [0, 1, 2, 0, 3, 0]
    alone = tf.distribute.get_strategy()
    expected = stepped(alone, TWICE[name], order)
    once = stepped(alone, TWICE[name])
    found = stepped(mirrored, lambda: tfo.ShardedState(TWICE[name]()), order)
    assert_alike(found, expected)
    assert np.abs(found[0][0].numpy() - once[0][0].numpy()).max() > 1e-2


def test_two_gradients_are_accumulated_once(mirrored):
    """Keras itself adds the accumulated gradient to both."""
    order = [0, 1, 2, 0, 3]
    found = stepped(
        mirrored,
        lambda: tfo.ShardedState(
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        ),
        order,
        steps=4,
    )
    plain = functools.partial(keras.optimizers.SGD, 0.1)
    expected = stepped(mirrored, plain, order, steps=2)
    assert_alike(found, expected, state=False)


class Repeated(tfo.ShardedState):
    """Is built with its first variable twice."""

    def build(self, variables):
        super().build([*variables, variables[0]])


@pytest.mark.parametrize("kind", [keras.optimizers.Adam, tfo.Lamb])
def test_a_variable_that_is_listed_twice_has_one_average(mirrored, kind):
    def inner():
        return kind(0.1, use_ema=True, ema_momentum=0.5)

    found = stepped(mirrored, lambda: Repeated(inner()))
    assert_alike(found, stepped(mirrored, lambda: tfo.ShardedState(inner())))


class StartsAtWeights(tfo.Lamb):
    """Assigns to its slots while it is built."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.starts = [
            self.add_variable_from_reference(v, "start") for v in variables
        ]
        for start, variable in zip(self.starts, variables, strict=True):
            self.assign(start, keras.ops.copy(variable))

    def update_step(self, gradient, variable, learning_rate):
        start = self.starts[self._get_variable_index(variable)]
        self.assign_sub(start, learning_rate * gradient)
        self.assign(variable, start)


AT_WEIGHTS = {
    "Lamb": lambda: StartsAtWeights(0.1),
    "shared Lamb": lambda: tfo.ShardedState(StartsAtWeights(0.1)),
}
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
    AT_WEIGHTS["ScheduleFreeAdamW"] = lambda: tfo.ShardedState(
        keras.optimizers.ScheduleFreeAdamW(0.1)
    )


@pytest.mark.parametrize("name", cases.with_long(AT_WEIGHTS, ["shared Lamb"]))
def test_variables_built_in_a_step_start_equal_on_all_devices(mirrored, name):
    make = AT_WEIGHTS[name]
    found = stepped(mirrored, make, is_built=False)
    assert_alike(found, stepped(mirrored, make))


@pytest.mark.parametrize("limit", ["clipnorm", "global_clipnorm"])
def test_large_gradients_are_clipped(mirrored, limit):
    """The square of their norm is too large for float32."""
    with mirrored.scope():
        weights = [keras.Variable(np.zeros(3), dtype="float32") for _ in "ab"]
        inner = keras.optimizers.SGD(1.0, **{limit: 2.0})
        sharded = tfo.ShardedState(inner)
        sharded.build(weights)
    scales = np.array([3e25, 4e25])

    def step():
        gradients = [tf.fill([3], np.float32(scale / 2)) for scale in scales]
        sharded.apply(gradients, weights)

    tf.function(functools.partial(mirrored.run, step))()
    sizes = scales if limit == "global_clipnorm" else np.ones(2)
    norm = np.sqrt(np.sum(sizes**2)) if limit == "global_clipnorm" else 1.0
    for weight, size in zip(weights, sizes / norm, strict=True):
        np.testing.assert_allclose(
            weight.numpy(), -2.0 * size / np.sqrt(3), rtol=1e-5
        )


@pytest.mark.parametrize("limit", ["clipnorm", "global_clipnorm"])
def test_limits_that_keras_ignores_change_nothing(mirrored, limit):
    def make():
        return keras.optimizers.SGD(0.1, **{limit: -1.0})

    found = stepped(mirrored, lambda: tfo.ShardedState(make()))
    assert_alike(found, stepped(tf.distribute.get_strategy(), make))


UNEVEN = pytest.mark.filterwarnings("ignore:No replica should")


@UNEVEN
@pytest.mark.parametrize("kind", [keras.Variable, tf.Variable])
def test_a_scalar_may_be_most_of_a_group(mirrored, kind):
    with mirrored.scope():
        scale = kind(np.float32(1.0))
        sharded = tfo.ShardedState(keras.optimizers.SGD(0.25))
    step = functools.partial(
        mirrored.run, lambda: sharded.apply([tf.constant(0.5)], [scale])
    )
    tf.function(step)()
    assert scale.numpy() == 0.75


def test_one_replica_constrains_variables_of_tensorflow_once():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        weight = tf.Variable([1.0], constraint=lambda value: value / 2)
        sharded = tfo.ShardedState(keras.optimizers.SGD(0.25))
    step = functools.partial(
        strategy.run, lambda: sharded.apply([tf.constant([1.0])], [weight])
    )
    tf.function(step)()
    assert weight.numpy() == 0.375


def fitted(strategy, make, first, then):
    """Return a model in which some layers are frozen, then others."""
    keras.utils.set_random_seed(0)
    rows = np.random.default_rng(0).random((16, 6)).astype("float32")
    with strategy.scope():
        layers = keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)
        model = keras.Sequential([keras.Input((6,)), *layers])
        layers[0].trainable = first
        model.compile(make(), "mse")
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model.fit(rows, rows[:, :3], **options)
    layers[0].trainable = then
    model.fit(rows, rows[:, :3], **options)
    return model


@UNEVEN
@pytest.mark.parametrize("first", cases.with_long([True, False], [True]))
def test_averages_cover_variables_that_steps_move(mirrored, first):
    """Layers are frozen or thawed without a new `compile`."""
    make = functools.partial(tfo.Lamb, 0.1, use_ema=True, ema_momentum=0.5)
    model = fitted(mirrored, lambda: tfo.ShardedState(make()), first, not first)
    expected = fitted(mirrored, make, first, not first)
    assert_close(model.weights, expected.weights, rtol=0, atol=1e-6)


AROUND = {
    "LossScaleOptimizer": keras.optimizers.LossScaleOptimizer,
    "MultiOptimizer": lambda inner: keras.optimizers.MultiOptimizer(
        lambda variable: inner
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=marks)
        for name, marks in (
            ("LossScaleOptimizer", []),
            ("MultiOptimizer", [cases.needs_groups, pytest.mark.long]),
        )
    ],
)
@pytest.mark.parametrize("replicas", cases.with_long([1, 2], [1]))
def test_averages_inside_of_others_can_be_swapped_in(mirrored, name, replicas):
    strategy = mirrored if replicas > 1 else tf.distribute.get_strategy()

    def swapped(wrap):
        keras.utils.set_random_seed(0)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        rows = np.random.default_rng(0).random((16, 6)).astype("float32")
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            inner = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
            model.compile(AROUND[name](wrap(inner)), "mse")
        options = {"shuffle": False, "verbose": 0, "callbacks": [swap]}
        model.fit(rows, rows[:, :3], 4, epochs=2, **options)
        loss = model.evaluate(rows, rows[:, :3], verbose=0, callbacks=[swap])
        return [*model.get_weights(), loss]

    found, expected = swapped(tfo.ShardedState), swapped(lambda inner: inner)
    assert_close(found, expected, rtol=0, atol=1e-6)


def test_summary_of_offloaded_state_counts_this_process(mirrored):
    def summary(wrap):
        inner = tfo.AdamOffload(0.1, use_ema=True)
        stepped(mirrored, lambda: wrap(inner), steps=1)
        return inner.memory_summary()

    # All replicas are in this process.
    assert summary(tfo.ShardedState) == summary(lambda inner: inner)
