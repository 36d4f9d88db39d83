"""Selects what residuals send in a step: their largest entries, or all.

Lists have one element per residual. `masked` holds handles of the variables,
such as u, that are set to 0 wherever entries of a residual are sent.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.base.replicas import own_component
from tf_optimizers.compression.exchanges import GatheredExchange
from tf_optimizers.compression.residual import Residual
from tf_optimizers.compression.wire import Exchange, Wire


def send_largest(
    way: Exchange,
    residuals: Sequence[Residual],
    masked: Sequence[Sequence[tf.Tensor]],
    others: Sequence[Gradient],
    step: tf.Tensor,
    unit: tf.Tensor | None,
) -> list[Gradient]:
    """Send the largest entries, and take what was sent out of the residuals.

    Args:
        way: The exchange of the entries.
        residuals: Those of this replica.
        masked: See above.
        others: Gradients that every replica sends whole.
        step: int32 scalar. Where `top_k` takes its samples depends on it.
        unit: See `Wire.unit`.

    Returns:
        The sums over all replicas, first of the residuals' entries, then of
        the other gradients.
    """
    one = 1.0 if unit is None else unit
    selections = [
        residual.select(count, tf.stack([step, i]), one)
        for i, (residual, count) in enumerate(
            zip(residuals, way.counts, strict=True)
        )
    ]
    sent, received = way.sum(selections, others)
    for selection, values, residual, handles in zip(
        selections, sent, residuals, masked, strict=True
    ):
        residual.clear(selection, values, handles, one)
    count = len(residuals)
    updates = received[:count]
    if unit is not None:
        updates = [_multiplied(update, unit) for update in updates]
    return [*updates, *received[count:]]


def send_all(
    wire: Wire,
    residuals: Sequence[Residual],
    masked: Sequence[Sequence[tf.Tensor]],
    others: Sequence[Gradient],
    shared: Sequence[keras.Variable],
) -> list[Gradient]:
    """Send all that the residuals hold, and empty them.

    Nothing is selected or rounded. Each `shared` variable is summed as well,
    and every replica keeps an N-th of its sum.

    Returns:
        The sums over all replicas, first of the residuals, then of the other
        gradients.
    """
    count, end = len(residuals), len(residuals) + len(shared)
    held = [residual.everything() for residual in residuals]
    held += [tf.identity(own_component(variable)) for variable in shared]
    _, sums = GatheredExchange(wire, [], []).sum([], [*held, *others])
    for residual, handles in zip(residuals, masked, strict=True):
        residual.empty(handles)
    for variable, total in zip(shared, sums[count:end], strict=True):
        own_component(variable).assign(total / wire.replicas)
    return [*sums[:count], *sums[end:]]


def _multiplied(update: Gradient, unit: tf.Tensor) -> Gradient:
    """Return an update whose values were in multiples of a unit."""
    if not isinstance(update, tf.IndexedSlices):
        return unit * update
    values = unit * tf.cast(update.values, unit.dtype)
    return tf.IndexedSlices(values, update.indices, update.dense_shape)
