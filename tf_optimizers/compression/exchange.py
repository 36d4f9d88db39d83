"""One step between replicas: what each sends, and what all receive.

local gradient ── compressed? ── yes: sum on the host, accumulate,
                      │               select the largest ────────────┐
                      └───────── no: as it is ───────────────────────┤
                                                        all_reduce (SUM)
step of all ───── compressed? ── yes: as received; clear what was ───┤
                      │               sent                           │
                      └───────── no: accumulate the mean ────────────┘
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.base.replicas import local_rank
from tf_optimizers.compression.deal import Deal
from tf_optimizers.compression.memory import Memory
from tf_optimizers.compression.selection import Selection
from tf_optimizers.compression.wire import Wire


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
    everyone = range(len(gradients))
    chosen = {
        i: sparsity
        for i in everyone
        if sparsity is not None and memories[i].is_compressed(gradients[i])
    }
    whole = [i for i in everyone if i not in chosen]
    sums = _sum_on_host([gradients[i] for i in chosen], wire)
    selections = [
        memories[i].select(gradient, weights[i], share, tf.stack([step, i]))
        for (i, share), gradient in zip(chosen.items(), sums, strict=True)
    ]
    shapes = [weights[i].shape for i in chosen]
    sent, received = _all_reduce(
        selections, shapes, wire, [gradients[i] for i in whole]
    )
    for i, selection in zip(chosen, sent, strict=True):
        memories[i].clear(selection, weights[i])
    steps = dict(zip([*chosen, *whole], received, strict=True))
    for i in whole:
        steps[i] = memories[i].accumulate_mean(steps[i], weights[i])
    return [steps[i] for i in everyone]


def _sum_on_host(gradients: list[tf.Tensor], wire: Wire) -> list[tf.Tensor]:
    """Sum gradients over the replicas that share a memory."""
    if wire.devices == 1 or not gradients:
        return gradients
    return tf.distribute.get_strategy().extended.sum_on_host(
        gradients, local_rank(wire.devices)
    )


def _all_reduce(
    selections: list[Selection],
    shapes: list[tf.TensorShape],
    wire: Wire,
    gradients: list[Gradient],
) -> tuple[list[Selection], list[Gradient]]:
    """Sum selected entries, and gradients, over all replicas.

    Returns:
        What was sent of the selections; the sums of theirs and the others.
    """
    owners = wire.owners(
        [shape.num_elements() for shape in shapes],
        [selection.values.shape[0] for selection in selections],
    )
    context = tf.distribute.get_replica_context()
    if owners is None:
        messages = list(map(wire.message, selections, shapes))
        return selections, context.all_reduce(
            tf.distribute.ReduceOp.SUM, [*messages, *gradients]
        )
    deal = Deal(selections, owners, wire)
    dealt, *sums = context.all_reduce(
        tf.distribute.ReduceOp.SUM, [deal.message, *gradients]
    )
    entries, sent = deal.results(dealt)
    return sent, [*entries, *sums]
