"""The tests of every optimizer, for SparseLoCo.

Most use small variables and plain SGD: variables are not compressed, and the
reference is SGD. test_sparse_loco.py tests large variables, and other inner
optimizers.
"""

import dataclasses

import cases
import keras
import pytest
import reference
from contract import Compressed, Contract

import tf_optimizers as tfo


@dataclasses.dataclass(frozen=True)
class Case(cases.Case):
    """SparseLoCo around an optimizer of Keras, which has the rate."""

    def make(self, learning_rate=0.02, **kwargs):
        inner = keras.optimizers.SGD(learning_rate)
        return self.optimizer(inner, **self.arguments | kwargs)


CASE = Case(tfo.SparseLoCo, reference.sgd, {})

pytestmark = [
    pytest.mark.parametrize("case", [CASE], ids=["sparse_loco"]),
    pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic:UserWarning"),
]


@pytest.fixture(params=[1, 3])
def lossless(request):
    return {"sync_every": request.param}


@pytest.fixture(
    params=[
        ("AdamW", 1),
        ("AdamW", 4),
        pytest.param(("Lamb", 1), marks=pytest.mark.long),
    ],
    ids=str,
)
def twin(request):
    name, every = request.param
    make = {"AdamW": keras.optimizers.AdamW, "Lamb": tfo.Lamb}[name]
    return lambda: tfo.SparseLoCo(make(1e-4), sync_every=every)


class TestSparseLoCo(Contract, Compressed):
    """Tests of SparseLoCo."""
