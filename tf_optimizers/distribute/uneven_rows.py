"""Values of which replicas have different numbers of rows."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers.distribute.message import pad_rows


def fill_up_rows(strategy: Any, value: Any) -> Any:
    """Append zeros, eagerly, to values with fewer rows than those of others."""
    local = strategy.experimental_local_results(value)
    if len(local) < len(strategy.extended.worker_devices) or (
        isinstance(value, tf.Variable)
    ):
        return value  # of the host, not of replicas; or of one shape

    def map_local(function: Callable) -> Any:
        """Return `function(component, number of the replica)` of each."""
        remaining = iter(local)
        return strategy.experimental_distribute_values_from_function(
            lambda context: function(
                next(remaining), context.replica_id_in_sync_group
            )
        )

    replicas = strategy.num_replicas_in_sync
    rows = map_local(
        lambda component, replica: (
            tf.shape(component)[0]
            * tf.one_hot(replica, replicas, dtype=tf.int32)
        )
    )
    # The strategy's own method would fill these up, too.
    most = tf.reduce_max(
        tf.distribute.Strategy.reduce(
            strategy, tf.distribute.ReduceOp.SUM, rows, axis=None
        )
    )
    return map_local(lambda component, _: pad_rows(component, most))
