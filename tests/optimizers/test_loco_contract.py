"""What the contract asks of every optimizer, asked of SparseLoCo.

Of small variables, around plain SGD: they are not compressed, and the reference
is SGD. test_sparse_loco.py is about large ones, and about others inside. Not
asked are weight decay, clipping and coefficients, which are those inside.
"""

import dataclasses

import cases
import keras
import pytest
import reference
from compressed_contract import *  # noqa: F403

import tf_optimizers as tfo


@dataclasses.dataclass(frozen=True)
class Case(cases.Case):
    """SparseLoCo around an optimizer of Keras that has the rate."""

    def make(self, learning_rate=0.02, **kwargs):
        inner = keras.optimizers.SGD(learning_rate)
        return self.optimizer(inner, **self.arguments | kwargs)


CASE = Case(tfo.SparseLoCo, reference.sgd, {})

pytestmark = [
    pytest.mark.parametrize("case", [CASE], ids=["sparse_loco"]),
    pytest.mark.filterwarnings("ignore:SparseLoCo saves traffic:UserWarning"),
]
