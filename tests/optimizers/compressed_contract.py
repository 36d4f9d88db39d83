"""What the contract asks of every optimizer that compresses.

Not asked are weight decay, clipping and the coefficients of Adam.
"""

import pytest
from test_contract import (  # noqa: F401
    test_accumulated_gradients_equal_their_mean,
    test_callable_sets_the_rate_of_each_step,
    test_constraint_is_kept,
    test_dynamic_loss_scaling_skips_a_nonfinite_gradient,
    test_eager_equals_graph,
    test_embedding_trains_in_fit,
    test_empty_slices_equal_a_zero_gradient,
    test_float8_scales_are_left_to_keras,
    test_float64_is_computed_in_float64,
    test_gradients_as_lists_and_of_other_floats_are_taken,
    test_half_precision_survives_a_tf_checkpoint,
    test_half_precision_trains_as_its_float32_twin,
    test_half_precision_under_xla_trains_as_its_float32_twin,
    test_learning_rate_can_be_set_between_steps,
    test_loss_scale_is_divided_out,
    test_moving_average_follows_and_replaces_the_weights,
    test_moving_average_is_of_the_weights_before_the_first_update,
    test_moving_average_is_of_the_weights_where_every_step_overflows,
    test_moving_average_of_half_precision_is_float32,
    test_moving_average_overwrites_at_its_frequency,
    test_moving_average_replaces_what_the_running_step_trains,
    test_schedule_sets_the_rate_of_each_step,
    test_step_matches_reference,
    test_terminate_on_nan_sees_a_nonfinite_gradient,
    test_weight_assigned_from_outside_wins_over_its_master,
    test_xla_equals_graph,
)


@pytest.fixture
def either_path():
    """There is one: nothing takes a norm."""
