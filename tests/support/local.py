"""Values that differ, or must not differ, between replicas of this process."""

import keras
import numpy as np


def per_replica(strategy, make):
    """Return the result of `make` for every replica's number."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )


def copies(strategy, variable):
    """Return each replica's value of a variable."""
    if isinstance(variable, keras.Variable):
        variable = variable.value
    local = strategy.experimental_local_results(variable)
    return [part.numpy() for part in local]


def assert_copies_agree(strategy, variables):
    """Check that each variable is bitwise equal on all replicas."""
    for variable in variables:
        first, *others = copies(strategy, variable)
        for other in others:
            np.testing.assert_array_equal(other, first)
