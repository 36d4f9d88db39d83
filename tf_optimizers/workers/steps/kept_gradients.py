"""Checks gradients that a step has kept in variables.

A step may add gradients to variables, and pass the sums to an optimizer after
several batches. A replica's share of the rows may differ between these batches,
but its sum is multiplied by its share of the last batch. The sums are right if
all batches are split evenly.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.replicas import replicas_of
from tf_optimizers.workers.data.look_ahead import after
from tf_optimizers.workers.steps.metric_variables import (
    operations_behind,
    source_of,
)
from tf_optimizers.workers.steps.share import Share

# Elementwise ops that a step may apply to kept gradients, for example to divide
# a sum by the number of batches.
_ELEMENTWISE = (
    *("Identity", "Cast", "Mul", "MulNoNan", "RealDiv", "DivNoNan"),
    *("AddV2", "Sub", "Neg"),
)


def check_even_if_kept(
    gradients: list[Any], variables: Sequence[Any], share: Share
) -> list[Any]:
    """Return gradients; if they are kept, check that the batch is split evenly.

    If the split is uneven, the returned tensors raise an error when they are
    computed. Only a graph shows whether gradients are kept, so eager steps are
    not checked.
    """
    if tf.executing_eagerly() or not _are_kept(gradients, variables):
        return gradients
    own, total = share.rows
    replicas = replicas_of().count
    check = tf.debugging.Assert(
        own * replicas == total,
        [
            "Gradients that a step keeps in variables must come from batches "
            "that are split evenly among replicas. Received: a batch of",
            tf.cast(total, tf.int32),
            f"rows for {replicas} replicas. Pass `gradient_accumulation_steps` "
            "to the optimizer instead, or use batches whose sizes are "
            "multiples of the number of replicas.",
        ],
    )
    return [
        None if each is None else after(check, tf.convert_to_tensor(each))
        for each in gradients
    ]


def _are_kept(gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
    """Return whether all gradients come from variables that a step assigns."""
    known = [each for each in gradients if each is not None]
    if any(isinstance(each, tf.IndexedSlices) for each in known):
        return False
    weights = {id(source_of(tf.convert_to_tensor(v))) for v in variables}
    tensors = map(tf.convert_to_tensor, known)
    return bool(known) and all(_is_kept(each, weights) for each in tensors)


def _is_kept(gradient: tf.Tensor, weights: set[int]) -> bool:
    """Return whether a gradient comes from a variable that a step assigns.

    The variable must have the gradient's shape, and only elementwise ops may
    compute the gradient from it. `weights` are the ids of handles to ignore.
    """
    for op in operations_behind(gradient, _ELEMENTWISE.__contains__):
        tensor, *_ = op.outputs
        handle = source_of(tensor)
        is_like = handle is not None and tensor.shape == gradient.shape
        if is_like and id(handle) not in weights and _is_assigned(handle):
            return True
    return False


def _is_assigned(handle: tf.Tensor) -> bool:
    return any("Assign" in op.type for op in handle.consumers())
