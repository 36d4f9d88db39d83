"""Shared state of optimizers of one's own, and of steps of one's own."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

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
