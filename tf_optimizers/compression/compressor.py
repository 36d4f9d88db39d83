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
from tf_optimizers.compression.exchange import choose_exchange
from tf_optimizers.compression.memory import Memory
from tf_optimizers.compression.wire import Wire


def exchange(
    gradients: Sequence[Gradient],
    weights: Sequence[tf.Variable],
    memories: Sequence[Memory],
    wire: Wire,
    sparsity: float | None,
    step: tf.Tensor,
    kind: str | None,
) -> list[Gradient]:
    """Return the step of all replicas for each variable.

    Args:
        gradients: This replica's.
        weights: The variables, or their components of this replica.
        memories: Theirs.
        wire: How entries travel.
        sparsity: The share to hold back, or None for a dense exchange.
        step: int32 scalar, the same on all replicas.
        kind: See `choose_exchange`.

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
    way = choose_exchange(
        wire,
        [weights[i].shape.num_elements() for i in chosen],
        [selection.values.shape[0] for selection in selections],
        kind,
    )
    sent, received = way.sum(selections, [gradients[i] for i in whole])
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
    return tf.distribute.get_strategy().extended.sum_on_worker(gradients)
