"""One step between replicas: what each sends, and what all receive.

local gradient ── compressed? ── yes: sum on the host, accumulate,
                      │               take the largest ──────────────┐
                      └───────── no: as it is ───────────────────────┤
                                                        all_reduce (SUM)
step of all ───── compressed? ── yes: as received ───────────────────┤
                      └───────── no: accumulate the mean ────────────┘
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.compression.memory import Memory
from tf_optimizers.compression.wire import Wire
from tf_optimizers.replicas import place_among


def exchange(
    gradients: Sequence[Gradient],
    weights: Sequence[tf.Variable],
    memories: Sequence[Memory],
    wire: Wire,
    sparsity: float | None,
    step: tf.Tensor,
) -> list[Gradient]:
    """Return the step of all replicas for each variable.

    Args:
        gradients: This replica's.
        weights: The variables, or their components of this replica.
        memories: Theirs.
        wire: How entries travel.
        sparsity: The share to hold back, or None for a dense exchange.
        step: int32 scalar, the same on all replicas.

    Returns:
        Dense tensors, and `tf.IndexedSlices` of the flattened variables.
    """
    shares = [
        sparsity if memory.is_compressed(gradient) else None
        for gradient, memory in zip(gradients, memories, strict=True)
    ]
    gradients = _sum_on_host(gradients, shares, wire)
    messages = [
        gradient
        if share is None
        else memory.compress(gradient, weight, share, tf.stack([step, index]))
        for index, (gradient, weight, memory, share) in enumerate(
            zip(gradients, weights, memories, shares, strict=True)
        )
    ]
    received = tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, messages
    )
    return [
        memory.accumulate_mean(total, weight) if share is None else total
        for total, weight, memory, share in zip(
            received, weights, memories, shares, strict=True
        )
    ]


def _sum_on_host(
    gradients: Sequence[Gradient], shares: Sequence[float | None], wire: Wire
) -> list[Gradient]:
    """Sum what is compressed over the replicas that share a memory."""
    dense = [g for g, s in zip(gradients, shares, strict=True) if s is not None]
    if wire.devices == 1 or not dense:
        return list(gradients)
    sums = iter(
        tf.distribute.get_strategy().extended.sum_on_host(
            dense, place_among(wire.devices)
        )
    )
    return [
        g if s is None else next(sums)
        for g, s in zip(gradients, shares, strict=True)
    ]
