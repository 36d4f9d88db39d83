"""The tests of every optimizer, for DGCMomentum.

Most use small variables, which are not compressed; the reference is momentum
SGD. test_dgc_momentum.py tests large variables.
"""

import cases
import pytest
import reference
from cases import with_long
from contract import Compressed, Contract, NotWrapping

import tf_optimizers as tfo

CASE = cases.Case(tfo.DGCMomentum, reference.momentum_sgd, {})

pytestmark = [
    pytest.mark.parametrize("case", [CASE], ids=["dgc_momentum"]),
    pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic:UserWarning"),
]

# test_value_dtype.py tries all dtypes.
LOSSLESS = [
    {"value_dtype": "float16", "momentum_masking": True},
    {"value_dtype": "int2", "momentum_masking": False},
    {"nesterov": True, "momentum_masking": False},
    {"nesterov": True, "momentum_masking": True},
]


@pytest.fixture(
    params=with_long(LOSSLESS, LOSSLESS[3:]),
    ids=lambda case: ", ".join(map(str, case.values())),
)
def lossless(request):
    return request.param


@pytest.fixture
def twin():
    return lambda: tfo.DGCMomentum(1e-4)


class TestDGCMomentum(Contract, NotWrapping, Compressed):
    """Tests of DGCMomentum."""
