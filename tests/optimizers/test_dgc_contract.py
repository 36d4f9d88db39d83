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

LOSSLESS = [
    {"value_dtype": dtype, "momentum_masking": masking}
    for dtype in ("float32", "float16", "bfloat16", "int4", "int2")
    for masking in (True, False)
]
LOSSLESS += [each | {"nesterov": True} for each in LOSSLESS[:2]]
LONG = [LOSSLESS[i] for i in (0, 1, 3, 4, 5, 6, 7, 8, 10)]


@pytest.fixture(
    params=with_long(LOSSLESS, LONG),
    ids=lambda case: ", ".join(map(str, case.values())),
)
def lossless(request):
    return request.param


@pytest.fixture
def twin():
    return lambda: tfo.DGCMomentum(1e-4)


class TestDGCMomentum(Contract, NotWrapping, Compressed):
    """Tests of DGCMomentum."""
