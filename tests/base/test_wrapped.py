"""The optimizers that train a model, and their variables."""

import cases
import keras
import pytest

import tf_optimizers as tfo
from tf_optimizers.wrapped import (
    build_optimizers,
    kind_of,
    only_local_steppers,
    optimizers_of,
    with_updated_variables,
)


class Holder:
    """A user's own object."""


def make_part(optimizer):
    part = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    part.compile(optimizer)
    return part


@pytest.fixture
def model():
    model, shared = keras.Model(), keras.optimizers.SGD()
    model.part = make_part(keras.optimizers.Adam())
    model.same = model.part
    model.inside = keras.Sequential([make_part(shared)])
    model.nested = {"a": [shared, (keras.optimizers.Lion(),)]}
    model.wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model.holder = Holder()
    model.holder.optimizer = keras.optimizers.Nadam()
    model.holder.model = model
    model.layer = keras.layers.TimeDistributed(
        make_part(keras.optimizers.RMSprop())
    )
    return model


def test_every_optimizer_is_found_once_in_any_attribute(model):
    found = optimizers_of(model)
    assert {name: kind_of(each) for name, each in found.items()} == {
        "part.optimizer": "Adam",
        "inside._layers[0].optimizer": "SGD",
        "nested['a'][1][0]": "Lion",
        "wrapped": "LossScaleOptimizer(Adam)",
        "holder.optimizer": "Nadam",
        "layer.layer.optimizer": "RMSprop",
    }
    model.compile("sgd")
    assert next(iter(optimizers_of(model))) == "optimizer"


def test_optimizers_of_compiled_parts_are_built(model):
    assert build_optimizers(model) == [
        *("nested['a'][1][0]", "wrapped", "holder.optimizer"),
    ]
    assert model.part.optimizer.built


def test_their_variables_belong_to_the_model(model):
    outside = keras.Variable(1.0)
    model.wrapped.build([outside])
    variables = with_updated_variables(model, model.variables)
    assert [outside] == [
        v for v in variables if all(v is not each for each in model.variables)
    ]


def test_a_model_makes_local_steps_if_no_optimizer_exchanges_in_each():
    def local(steps):
        return tfo.SparseLoCo(keras.optimizers.SGD(), steps)

    def found(outer, part=None):
        model = make_part(outer)
        if part is not None:
            model.part = make_part(part)
        return only_local_steppers(model)

    first, second = local(2), local(3)
    assert found(first) == [first]
    assert found(first, second) == [first, second]
    # In every step, replicas exchange whether gradients overflow.
    scaled = keras.optimizers.LossScaleOptimizer(local(2))
    assert found(scaled, second) == []
    assert found(local(1)) == []
    # Like a layer of a model that was trained before.
    assert found(keras.optimizers.Adam(), first) == []
    assert found(first, local(1)) == []


@cases.needs_groups
def test_groups_make_local_steps_if_no_group_exchanges_in_each():
    first = tfo.SparseLoCo(keras.optimizers.SGD(), 2)
    second = tfo.SparseLoCo(keras.optimizers.SGD(), 3)

    def found(*groups):
        default, kernels = groups
        groups = keras.optimizers.OptimizerMap(default, {".*/kernel": kernels})
        optimizer = keras.optimizers.MultiOptimizer(groups)
        return only_local_steppers(make_part(optimizer))

    assert found(second, first) == [first, second]
    assert found(keras.optimizers.Adam(), first) == []
    assert found(first, keras.optimizers.Adam()) == []
