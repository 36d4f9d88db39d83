"""On a GPU, Lamb and LANS step variables of one shape in one launch.

On a machine without a GPU, a CPU runs the same kernels.
"""

import cases
import devices
import keras
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_equal
from local import assert_copies_agree

import tf_optimizers as tfo
from tf_optimizers.layerwise import layerwise_optimizer

pytestmark = pytest.mark.usefixtures("on_cpu")

RATE = 0.05
ADAPTED = {"weight_decay": 0.1, "exclude_from_weight_decay": ["bias"]}
each_kind = pytest.mark.parametrize(
    "make", [tfo.Lamb, tfo.LANS], ids=["lamb", "lans"]
)


@pytest.fixture(autouse=True)
def gpu_kernels(monkeypatch):
    monkeypatch.setattr(layerwise_optimizer, "on_gpu", lambda: True)


def make_variables(layers, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = layers * [("kernel", (4, 5)), ("bias", (5,))]
    return [
        keras.Variable(rng.standard_normal(shape), dtype=dtype, name=name)
        for name, shape in shapes
    ]


def make_gradients(variables, step):
    rng = np.random.default_rng(1 + step)
    return [
        tf.constant(rng.standard_normal(v.shape), v.dtype) for v in variables
    ]


def assert_launches_do_not_matter(monkeypatch, train):
    """Check `train`, which returns weights before and after."""

    def trained(most):
        monkeypatch.setattr(layerwise_optimizer, "LAUNCH_VARIABLES", most)
        return [list(map(cases.as_numpy, values)) for values in train()]

    before, alone = trained(1)
    for weight, start in zip(alone, before, strict=True):
        assert np.abs(weight - start).max() > RATE / 10
    assert_equal(trained(2)[1], alone)


def launched(graph):
    """Return the number of kernels that a graph launches for variables."""
    return sum(
        op.type == "StatefulPartitionedCall"
        and "resource" in {tensor.dtype.name for tensor in op.inputs}
        for op in graph.get_operations()
    )


def graph_of_step(optimizer, variables):
    gradients = make_gradients(variables, 0)
    optimizer.build(variables)
    step = tf.function(lambda: optimizer.apply(gradients, variables))
    return step.get_concrete_function().graph


@each_kind
def test_layers_of_equal_shape_share_a_launch(make, monkeypatch):
    graph = graph_of_step(make(**ADAPTED), make_variables(12))
    assert launched(graph) == 2  # Kernels, biases.
    if make is tfo.LANS:
        return  # The rest is shared.
    graph = graph_of_step(
        make(), make_variables(4) + make_variables(4, "bfloat16")
    )
    assert launched(graph) == 2  # There are master weights in float32.
    monkeypatch.setattr(layerwise_optimizer, "LAUNCH_ELEMENTS", 60)
    graph = graph_of_step(make(), make_variables(5))
    assert launched(graph) == 2 + 1  # Three kernels, and two.
    monkeypatch.setattr(layerwise_optimizer, "LAUNCH_VARIABLES", 2)
    graph = graph_of_step(make(), make_variables(5))
    assert launched(graph) == 3 + 3
    monkeypatch.setattr(layerwise_optimizer, "on_gpu", lambda: False)
    graph = graph_of_step(make(), make_variables(5))
    assert launched(graph) == 10


@each_kind
@pytest.mark.parametrize(
    ("dtype", "graph"), [("float32", True), ("bfloat16", False)]
)
def test_few_launches_give_the_same_steps(make, dtype, graph, monkeypatch):
    def train():
        variables = make_variables(3, dtype) + make_variables(1)
        before = list(map(cases.as_numpy, variables))
        optimizer = make(RATE, gradient_accumulation_steps=2, **ADAPTED)
        optimizer.build(variables)

        def step(gradients):
            optimizer.apply(gradients, variables)

        step = tf.function(step) if graph else step
        for i in range(4):
            step(make_gradients(variables, i))
        return before, variables

    assert_launches_do_not_matter(monkeypatch, train)


@each_kind
def test_replicas_step_in_few_launches(make, mirrored, monkeypatch):
    graphs = []

    def train():
        with mirrored.scope():
            variables = make_variables(3)
            optimizer = make(RATE, **ADAPTED)
            optimizer.build(variables)
        before = list(map(cases.as_numpy, variables))

        @tf.function
        def step(gradients):
            mirrored.run(optimizer.apply, (gradients, variables))

        for i in range(2):
            gradients = make_gradients(variables, i)
            step(gradients)
        assert_copies_agree(mirrored, variables)
        graphs.append(step.get_concrete_function(gradients).graph)
        return before, variables

    assert_launches_do_not_matter(monkeypatch, train)
    assert list(map(launched, graphs)) == [2 * 6, 2 * (2 + 2)]


@each_kind
def test_each_device_launches_its_own(make, monkeypatch):
    def train():
        variables = []
        for device in devices.DEVICES:
            with tf.device(device):
                variables += make_variables(2)
        before = list(map(cases.as_numpy, variables))
        optimizer = make(RATE)
        optimizer.build(variables)
        optimizer.apply(make_gradients(variables, 0), variables)
        return before, variables

    assert_launches_do_not_matter(monkeypatch, train)
    with tf.device("CPU:1"):
        elsewhere = make_variables(2)
    assert launched(graph_of_step(make(), make_variables(2) + elsewhere)) == 4


@each_kind
def test_each_gradient_of_a_variable_is_a_step(make, monkeypatch):
    def train():
        variables = make_variables(2)
        before = list(map(cases.as_numpy, variables))
        optimizer = make(RATE)
        optimizer.build(variables)
        gradients = make_gradients(variables, 0) + make_gradients(variables, 1)
        optimizer.apply(gradients, variables + variables)
        return before, variables

    assert_launches_do_not_matter(monkeypatch, train)


@each_kind
def test_a_step_of_a_subclass_gets_each_variable(make):
    seen = []

    class Noted(make):
        def update_step(self, gradient, variable, learning_rate):
            seen.append(variable.shape)
            super().update_step(gradient, variable, learning_rate)

    graph = graph_of_step(Noted(), make_variables(3))
    assert seen == 3 * [(4, 5), (5,)]
    assert launched(graph) == 6
