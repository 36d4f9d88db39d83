"""Kernels outlive optimizers, but not their context; tapes ignore them."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from real_workers import output_of

import tf_optimizers as tfo
from tf_optimizers import kernels

RESET = """
import keras
import tensorflow as tf
from tensorflow.python.eager import context

import tf_optimizers as tfo

OPTIMIZERS = {
    tfo.Lamb: {},
    tfo.LANS: {},
    tfo.AdamOffload: {},
    tfo.DGCMomentum: {"min_compress_size": 1},
}
[cpu] = tf.config.list_physical_devices("CPU")
for _ in range(2):
    context._reset_context()
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for make, own in OPTIMIZERS.items():
        with strategy.scope():
            weight = keras.Variable([1.0, 2.0])
            optimizer = make(0.1, clipnorm=1.0, **own)
        strategy.run(optimizer.apply, ([tf.ones(2)], [weight]))
        print(*weight.numpy())
"""


@pytest.mark.long
def test_steps_continue_after_tensorflow_is_reset():
    """Keras's own tests of strategies reset TensorFlow before each test."""
    lines = output_of(RESET).splitlines()
    first, second = lines[:4], lines[4:]
    assert first == second
    assert len(set(first)) == 4


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: tfo.Lamb(clipnorm=1.0),
        lambda: tfo.AdamOffload(global_clipnorm=1.0),
        lambda: tfo.DGCMomentum(0.1, clipnorm=1.0),
    ],
    ids=["lamb", "offload", "dgc"],
)
@pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic")
def test_tape_that_still_records_has_the_gradients_of_the_loss(make, graph):
    """Kernels of 4,096 elements loop, and XLA has no gradient of a loop."""
    variable, optimizer = keras.Variable(tf.ones([64, 64])), make()
    optimizer.build([variable])

    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(variable.value**2)
            gradient = tape.gradient(loss, variable.value)
            optimizer.apply([gradient], [variable])
        return tape.gradient(loss, variable.value)

    gradient = tf.function(step)() if graph else step()
    np.testing.assert_array_equal(gradient, np.full([64, 64], 2.0))
    assert (variable.numpy() < 1).all()


L2 = keras.regularizers.L2
SMALL = {"sparsity": (0.9,), "min_compress_size": 1}
# Optimizers with numbers, and a second value of each that changes a step.
SWEEPS = {
    "lamb": (
        lambda **kwargs: tfo.Lamb(0.1, **kwargs),
        {
            "beta_1": (0.9, 0.0),
            "beta_2": (0.99, 0.9),
            "epsilon": (1e-3, 2e-3),
            "weight_decay": (0.5, 0.0),
            "upper_bound": (1.0, 1.2),
            "clipnorm": (1e-2, 2e-2),
        },
    ),
    "lans": (
        lambda **kwargs: tfo.LANS(0.1, **kwargs),
        {
            "beta_1": (0.9, 0.8),
            "beta_2": (0.99, 0.0),
            "epsilon": (1e-3, 2e-3),
            "weight_decay": (0.5, 0.6),
            "lower_bound": (20.0, 30.0),
            "clip_normalized_gradient": (0.1, 0.2),
        },
    ),
    "offload": (
        lambda **kwargs: tfo.AdamOffload(0.1, nesterov=True, **kwargs),
        {
            "beta_1": (0.9, 0.8),
            "beta_2": (0.99, 0.9),
            "epsilon": (1e-3, 2e-3),
            "weight_decay": (0.5, 0.6),
            "global_clipnorm": (1e-2, 2e-2),
        },
    ),
    "dgc": (
        lambda **kwargs: tfo.DGCMomentum(0.1, **SMALL, **kwargs),
        {
            "momentum": (0.9, 0.8),
            "regularizer": (L2(0.1), L2(0.2)),
            "clipnorm": (0.5, 0.6),
        },
    ),
    "dense dgc": (
        lambda **kwargs: tfo.DGCMomentum(0.1, **kwargs),
        {
            "momentum": (0.9, 0.8),
            "regularizer": (L2(0.1), L2(0.2)),
            "clipnorm": (0.5, 0.6),
        },
    ),
    "loco": (
        lambda **kwargs: tfo.SparseLoCo(
            keras.optimizers.SGD(0.1), **SMALL, **kwargs
        ),
        {"residual_decay": (0.9, 0.8)},
    ),
}


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.filterwarnings("ignore:.*saves traffic:UserWarning")
def test_optimizers_of_a_sweep_share_their_kernels(name, monkeypatch):
    """Otherwise each optimizer would compile kernels, and leave them behind."""
    make, numbers = SWEEPS[name]
    start = np.linspace(-2, 2, 30, dtype="float32").reshape(6, 5)

    def train(changed=None):
        values = {key: pair[key == changed] for key, pair in numbers.items()}
        variable, optimizer = keras.Variable(start), make(**values)
        rng = np.random.default_rng(0)
        for _ in range(3):
            gradient = rng.standard_normal((6, 5)).astype("float32")
            optimizer.apply([tf.constant(gradient)], [variable])
        return variable.numpy()

    def recompile():
        cached = functools.cache(kernels._cached_function.__wrapped__)
        monkeypatch.setattr(kernels, "_cached_function", cached)
        return cached

    cached = recompile()
    first, count = train(), cached.cache_info().currsize
    found = {number: train(number) for number in numbers}
    assert count and cached.cache_info().currsize == count
    for number, weights in found.items():
        assert np.abs(weights - first).max() > 1e-4, number
    recompile()
    np.testing.assert_array_equal(train(number), weights)


def test_numbers_are_distinct_from_equal_constants_of_other_types():
    """Python's True, 1 and 1.0 are equal."""
    like = tf.zeros([2])

    def kinds(*constants):
        found = []

        def note(*args):
            found.extend(map(tf.is_tensor, args))

        kernels.compiled(note, like, *constants)()
        return found

    assert kinds(True, 1.0) == [False, True]
    assert kinds(1.0, 1) == [True, False]
    assert kinds(1, 1) == [False, False]
