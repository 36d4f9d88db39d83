"""What residuals send in a step: their largest entries, or all that they hold.

Of lists with an element per residual; `masked` has the variables, by their
handles, that become 0 where a residual is sent.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.base.replicas import own_component
from tf_optimizers.compression.gathered import GatheredExchange
from tf_optimizers.compression.residual import Residual
from tf_optimizers.compression.wire import Exchange, Selection, Wire


def send_largest(
    way: Exchange,
    residuals: Sequence[Residual],
    others: Sequence[Gradient],
    step: tf.Tensor,
    unit: tf.Tensor | None,
) -> tuple[Sequence[Selection], list[Gradient]]:
    """Return what was sent of residuals, and the sums of it and of others.

    Nothing changes before `take_out`.

    Args:
        way: What exchanges the entries.
        residuals: Of this replica.
        others: What all replicas send whole.
        step: int32 scalar, decides where samples are taken.
        unit: Of `Wire.unit`.
    """
    one = 1.0 if unit is None else unit
    selections = [
        residual.select(count, tf.stack([step, i]), one)
        for i, (residual, count) in enumerate(
            zip(residuals, way.counts, strict=True)
        )
    ]
    sent, received = way.sum(selections, others)
    count = len(residuals)
    updates = received[:count]
    if unit is not None:
        updates = [_multiplied(update, unit) for update in updates]
    return sent, [*updates, *received[count:]]


def take_out(
    sent: Sequence[Selection],
    residuals: Sequence[Residual],
    masked: Sequence[Sequence[tf.Tensor]],
) -> None:
    """Take what was sent out of residuals."""
    for selection, residual, handles in zip(
        sent, residuals, masked, strict=True
    ):
        residual.clear(selection, handles)


def send_all(
    wire: Wire,
    residuals: Sequence[Residual],
    masked: Sequence[Sequence[tf.Tensor]],
    others: Sequence[Gradient],
    shared: Sequence[keras.Variable],
) -> list[Gradient]:
    """Return the sums of all that is held back, and of other gradients.

    Nothing is selected or rounded. Of `shared` variables each replica has an
    N-th of the sum afterwards.
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
    """Return an update whose values were multiples of a unit."""
    if not isinstance(update, tf.IndexedSlices):
        return unit * update
    values = unit * tf.cast(update.values, unit.dtype)
    return tf.IndexedSlices(values, update.indices, update.dense_shape)
