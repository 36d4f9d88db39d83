"""One step between replicas: what each sends, and what all receive.

local gradient ── compressed? ── yes: accumulate, take the largest ─┐
└───────── no: as it is ──────────────────────┤
all_reduce (SUM)
step of all ────── compressed? ── yes: entries as received ─────────┤
└───────── no: accumulate the mean ───────────┘
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.compression.memory import Memory
from tf_optimizers.distribute.entries import SortedEntries


def exchange(
    gradients: Sequence[Gradient],
    weights: Sequence[tf.Variable],
    memories: Sequence[Memory],
    sparsity: float | None,
    step: tf.Tensor,
) -> list[Gradient]:
    """Return the step of all replicas for each variable.

    Args:
        gradients: This replica's.
        weights: The variables, or their components of this replica.
        memories: Theirs.
        sparsity: The share to hold back, or None for a dense exchange.
        step: int32 scalar, the same on all replicas.

    Returns:
        Dense tensors, and `tf.IndexedSlices` of the flattened variables.
    """
    messages = [
        memory.compress(gradient, weight, sparsity, tf.stack([step, index]))
        if sparsity is not None and memory.is_compressed(gradient)
        else gradient
        for index, (gradient, weight, memory) in enumerate(
            zip(gradients, weights, memories, strict=True)
        )
    ]
    received = tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, messages
    )
    return [
        total
        if isinstance(message, SortedEntries)
        else memory.accumulate_mean(total, weight)
        for message, total, weight, memory in zip(
            messages, received, weights, memories, strict=True
        )
    ]
