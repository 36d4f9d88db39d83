"""Public names in addition to Keras's are documented.

Keras may use any other public name some day.
"""

import inspect

import keras
import pytest

import tf_optimizers as tfo
from tf_optimizers._compat.keras_internals import HOOKS
from tf_optimizers.base.inner import Wrapper

OPTIMIZERS = {
    tfo.Lamb: (),
    tfo.LANS: (),
    tfo.AdamOffload: ("is_elementwise", "memory_summary"),
    tfo.DGCMomentum: ("communication_summary", "for_steps"),
    tfo.ShardedState: ("is_elementwise", "memory_summary"),
    tfo.SparseLoCo: (
        "communication_summary",
        "for_steps",
        "synchronize",
        "is_synchronized",
        # For callbacks and the strategy.
        "batches_left",
        "expect_sparse_gradients",
        "finish_exchange",
        "sparse_gradients",
    ),
}


def make(optimizer):
    """Return an optimizer, around another one if it needs that."""
    if optimizer in (tfo.SparseLoCo, tfo.ShardedState):
        return optimizer(keras.optimizers.SGD())
    return optimizer(1e-3)


def public(thing):
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.filterwarnings("ignore:.* saves traffic")
@pytest.mark.parametrize(
    ("optimizer", "methods"),
    OPTIMIZERS.items(),
    ids=[optimizer.__name__ for optimizer in OPTIMIZERS],
)
def test_public_names_are_keras_s_or_documented(optimizer, methods):
    ours = make(optimizer)
    ours.build([keras.Variable([1.0])])
    theirs = keras.optimizers.SGD(1e-3)
    arguments = inspect.signature(optimizer).parameters
    extra = public(ours) - public(keras.optimizers.Optimizer) - set(arguments)
    # Arguments, which the constructor sets.
    extra -= {n for n in vars(theirs) if n in theirs.get_config()}
    assert extra - {"built"} == set(methods)


@pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=[one.__name__ for one in OPTIMIZERS]
)
def test_at_most_two_classes_stand_between_it_and_keras_s(optimizer):
    """The common base class of wrappers does not count."""
    mro = [one for one in optimizer.mro() if one is not Wrapper]
    assert mro.index(keras.optimizers.Optimizer) <= 3


@pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=[one.__name__ for one in OPTIMIZERS]
)
def test_private_names_are_not_keras_s(optimizer):
    """Names that _compat/ replaces intentionally do not count."""
    ours, theirs = make(optimizer), keras.optimizers.SGD(1e-3)
    names = {
        name
        for one in optimizer.mro()
        if one.__module__.startswith("tf_optimizers")
        and not one.__module__.startswith("tf_optimizers._compat")
        for name in vars(one)
        if name.startswith("_") and not name.startswith("__")
    }
    names |= set(vars(ours)) - set(vars(theirs))
    assert not (names - set(HOOKS)) & set(dir(theirs))
