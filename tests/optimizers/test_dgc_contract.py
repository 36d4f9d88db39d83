"""What the contract asks of every optimizer, asked of DGCMomentum.

Of small variables, that is: they are not compressed, and the reference is
momentum SGD. test_dgc_momentum.py is about large ones. Not asked are weight
decay, the ways of clipping that DGCMomentum refuses, and Adam's coefficients.
"""

import cases
import pytest
import reference
from compressed_contract import *  # noqa: F403
from test_contract import (  # noqa: F401
    test_learning_rate_of_any_number_kind_is_accepted,
    test_save_and_load_mid_run_gives_the_same_next_step,
    test_second_optimizer_shares_the_kernels,
)

import tf_optimizers as tfo

CASE = cases.Case(tfo.DGCMomentum, reference.momentum_sgd, {})

pytestmark = [
    pytest.mark.parametrize("case", [CASE], ids=["dgc_momentum"]),
    pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic:UserWarning"),
]
