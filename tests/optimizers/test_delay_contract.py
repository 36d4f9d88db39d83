"""What the contract asks of every optimizer, asked of DGCMomentum a step late.

Of small variables; the reference is momentum SGD that steps by the momentum of
the step before. Not asked is what assumes that a gradient counts at once.
"""

import cases
import pytest
import reference
from test_contract import (  # noqa: F401
    either_path,
    test_callable_sets_the_rate_of_each_step,
    test_eager_equals_graph,
    test_empty_slices_equal_a_zero_gradient,
    test_float8_scales_are_left_to_keras,
    test_float64_is_computed_in_float64,
    test_half_precision_survives_a_tf_checkpoint,
    test_half_precision_trains_as_its_float32_twin,
    test_loss_scale_is_divided_out,
    test_moving_average_follows_and_replaces_the_weights,
    test_save_and_load_mid_run_gives_the_same_next_step,
    test_schedule_sets_the_rate_of_each_step,
    test_step_matches_reference,
    test_xla_equals_graph,
)

import tf_optimizers as tfo

CASE = cases.Case(tfo.DGCMomentum, reference.momentum_sgd, {"delay": 1})

pytestmark = [
    pytest.mark.parametrize("case", [CASE], ids=["late"]),
    pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic:UserWarning"),
]
