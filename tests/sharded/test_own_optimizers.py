"""Shared state of optimizers of one's own, and of steps of one's own."""

import functools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
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
    """Return variables and optimizer after steps, in which all have an N-th.

    Args:
        strategy: The strategy.
        make: Makes the optimizer.
        order: The variable of each gradient.
        is_built: Whether the optimizer is built before.
        steps: How many there are.
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
    for variable in variables:
        copies = strategy.experimental_local_results(variable.value)
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])
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
    """Goes through a copy of the variables."""

    def build(self, variables):
        super().build(list(variables))


class Reversed(keras.optimizers.Optimizer):
    """Makes slots in other orders, of which two loops are at a time."""

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
    # The rate and the number of steps.
    assert summary["shared"] == 12


class ByIndex(Counted):
    """Makes slots of which nobody can tell what they belong to."""

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
    """Has a state of its own of each variable, and uses another's."""

    def build(self, variables):
        super().build(variables)
        self.means = self.means[1:] + self.means[:1]

    def count(self, place):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ByIndex, r"count_0 of shape \(6, 8\), which a variable has, too"),
        (Scalars, "changes state which every replica has"),
        (Flags, "of dtype bool"),
        (Others, "uses state which belongs to another one"),
    ],
)
def test_state_of_no_variable_is_refused(mirrored, make, message):
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
    "name", cases.with_long(TWICE, ["AdamW", "clipped", "Nadam", "AdamOffload"])
)
def test_a_variable_may_have_two_gradients(mirrored, name):
    """As of two losses that share an encoder."""
    order = [0, 1, 2, 0, 3, 0]
    alone = tf.distribute.get_strategy()
    expected = stepped(alone, TWICE[name], order)
    once = stepped(alone, TWICE[name])
    found = stepped(mirrored, lambda: tfo.ShardedState(TWICE[name]()), order)
    assert_alike(found, expected)
    assert np.abs(found[0][0].numpy() - once[0][0].numpy()).max() > 1e-2


def test_two_gradients_are_accumulated_once(mirrored):
    """Keras alone adds what it has accumulated to either."""
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


class StartsAtWeights(tfo.Lamb):
    """Assigns to what it makes, while it is built."""

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


@pytest.mark.parametrize("name", AT_WEIGHTS)
def test_what_a_step_builds_begins_alike_on_all_devices(mirrored, name):
    make = AT_WEIGHTS[name]
    found = stepped(mirrored, make, is_built=False)
    assert_alike(found, stepped(mirrored, make))
