"""Lets replicas skip a step together in Keras's dynamic loss scaling."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.patches import REPLICAS, check_names, replace


@functools.cache
def agree_on_overflow() -> None:
    """Let replicas skip a step together in Keras's dynamic loss scaling.

    Keras (3.15) asks one replica whether its gradients are finite, before they
    are summed: the first; or, where replicas do not merge, each itself, in a
    `tf.cond` of its own in which `iterations` cannot be assigned to, even
    with one replica. `compile` wraps optimizers in this class by itself and
    takes no other, so that its method must be replaced, from now on in this
    process. Without a strategy nothing changes.
    """

    def together(apply_alone: Callable) -> Callable:
        @functools.wraps(apply_alone)
        def apply(
            optimizer: Any,
            grads: Sequence[Any],
            trainable_variables: Any = None,
        ) -> None:
            replica = tf.distribute.get_replica_context()
            if replica is None or not tf.distribute.has_strategy():
                apply_alone(optimizer, grads, trainable_variables)
            else:
                _apply_together(replica, optimizer, grads, trainable_variables)

        return apply

    check_names(REPLICAS)
    replace("_tf_apply", together)


def _apply_together(
    replica: Any, optimizer: Any, grads: Sequence[Any], trainable_variables: Any
) -> None:
    """Apply gradients if they are finite on all replicas."""

    def overflow(grads: Sequence[Any]) -> tf.Tensor:
        return tf.cast(~optimizer.check_finite(grads), tf.float32)

    def merged(strategy: Any, grads: Any, variables: Any) -> None:
        extended = strategy.extended
        every = extended.call_for_each_replica(overflow, args=(grads,))
        total = extended.reduce_to(tf.distribute.ReduceOp.SUM, every, every)
        keras.ops.cond(
            strategy.experimental_local_results(total)[0] == 0,
            # All replicas in one branch: they may exchange and assign there.
            lambda: extended.call_for_each_replica(
                optimizer._stateful_handle_finite_grads,
                args=(grads, variables),
            ),
            optimizer._stateful_handle_non_finite_grads,
        )

    replica.merge_call(merged, args=(grads, trainable_variables))
