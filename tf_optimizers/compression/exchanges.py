"""Sends entries of residuals to all replicas, or all that they hold.

Replicas gather entries, or sum them as a dense tensor.

In a ring of N replicas, each passes on the entries of all but one: N - 1
shares. To sum dense tensors costs each replica 2 (N - 1) / N tensors, however
many entries are not 0. So entries of S bytes travel densely if

    N S > 2 (bytes of the dense tensor)

Both sides are the same on all replicas, so all of them decide alike.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.base.components import own_component
from tf_optimizers.codes.entries import Entries, whole_bytes
from tf_optimizers.compression.residual import Residual
from tf_optimizers.compression.sharded_exchange import ShardedExchange
from tf_optimizers.compression.wire import Exchange, Selection, Wire
from tf_optimizers.replicas import replicas_of

_DENSE = 8 * tf.float32.size  # Bits.


class GatheredExchange(Exchange):
    """All replicas gather the selected entries of each."""

    @property
    def bytes_for_one(self) -> float:
        """What a replica receives from each."""
        # Dense tensors count half: it takes no sorting to sum them.
        bits = sum(
            min(entries, _DENSE * size / self.wire.replicas)
            for entries, size in zip(self._entry_bits, self.sizes, strict=True)
        )
        return bits / 8

    @property
    def _entry_bits(self) -> list[int]:
        return list(map(self.wire.entry_bits, self.sizes, self.counts))

    def is_dense(self, i: int) -> bool:
        """Tell whether the i-th variable's entries travel as a dense tensor."""
        entries = self.wire.replicas * self._entry_bits[i]
        return entries > 2 * _DENSE * self.sizes[i]

    def sent_bytes(self) -> list[int]:
        """Return what the selected entries of each variable take."""
        bits = [
            _DENSE * size if self.is_dense(i) else self._entry_bits[i]
            for i, size in enumerate(self.sizes)
        ]
        return (
            whole_bytes(bits) if self.wire.is_packed else [b // 8 for b in bits]
        )

    def sum(
        self, selections: Sequence[Selection], others: Sequence[Gradient]
    ) -> tuple[list[tf.Tensor], list[Gradient]]:
        """Sum selected entries, all of which are sent, and other gradients."""
        if not selections:
            return [], replicas_of().exchange(others)
        positions = [self.wire.shares(s.positions, -1) for s in selections]
        values = [self.wire.shares(s.values) for s in selections]
        values = self.wire.rounded(values, positions)
        own = self.wire.own_share
        parts = [
            self._part(i, own(value), own(at), selections[i].shape)
            for i, (value, at) in enumerate(zip(values, positions, strict=True))
        ]
        sent = [
            tf.cast(self.wire.joined(value, count), tf.float32)
            for value, count in zip(values, self.counts, strict=True)
        ]
        return sent, replicas_of().exchange([*parts, *others])

    def _part(
        self,
        i: int,
        values: tf.Tensor,
        positions: tf.Tensor,
        shape: tf.TensorShape,
    ) -> Entries | tf.Tensor:
        """Return what this replica sends of a variable, dense or not."""
        size = self.sizes[i]
        if not self.is_dense(i):
            if self.wire.is_packed:
                return Entries(values, positions, size, self.wire.value_dtype)
            values = tf.cast(values, self.wire.carrier_dtype)
            return Entries(values, positions, size)
        values = tf.cast(values, tf.float32)
        places = tf.maximum(positions, 0)[:, tf.newaxis]
        return tf.reshape(tf.scatter_nd(places, values, [size]), shape)


# So many times the bytes of shards must the gathered ones be, a message
# counting as many as 100 Mbit/s carry while it is on its way: 2.5 ms, as
# measured. It is one to one other replica, of N - 1 that leave in a round; what
# that costs in all, `ROUND_BYTES` of message.py, is four of these.
_WORTH = 2
_MESSAGE = 1 << 15


def choose_exchange(
    wire: Wire,
    sizes: Sequence[int],
    counts: Sequence[int],
    kind: str | None = None,
) -> Exchange:
    """Return what exchanges the entries of some variables.

    `GatheredExchange` sends the entries of each to all; what a replica
    receives grows with their number, N. `ShardedExchange` sends of K entries
    in all some K / N to every other replica, and then as many sums, whatever N
    is. As these are two messages instead of one, and sums are selected again,
    it is for those who thereby save half of the bytes, of which a message,
    whatever is in it, counts M = 32,768:

        (all entries) + M > 2 (entries for one + its sums + 2 M)

    Args:
        wire: How entries travel.
        sizes: Of the variables, in elements.
        counts: How many entries of each are selected.
        kind: "gathered", "sharded", or None for what takes less. Only our
            strategy has shards.
    """
    gathered = GatheredExchange(wire, sizes, counts)
    if kind == "gathered" or not wire.is_packed or not sizes:
        return gathered
    sharded = ShardedExchange(wire, sizes, counts)
    by_shards = _WORTH * (sharded.bytes_for_one + 2 * _MESSAGE)
    if kind == "sharded" or gathered.bytes_for_one + _MESSAGE > by_shards:
        return sharded
    return gathered


def send_largest(
    exchange: Exchange,
    residuals: Sequence[Residual],
    others: Sequence[Gradient],
    step: tf.Tensor,
    unit: tf.Tensor | None,
) -> list[Gradient]:
    """Send the largest entries, and take what was sent out of the residuals.

    Args:
        exchange: Of the entries.
        residuals: Those of this replica.
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
            zip(residuals, exchange.counts, strict=True)
        )
    ]
    sent, received = exchange.sum(selections, others)
    for each in zip(residuals, selections, sent, strict=True):
        residual, selection, values = each
        residual.clear(selection, values, one)
    count = len(residuals)
    updates = received[:count]
    if unit is not None:
        updates = [_multiplied(update, unit) for update in updates]
    return [*updates, *received[count:]]


def send_all(
    wire: Wire,
    residuals: Sequence[Residual],
    others: Sequence[Gradient],
    shared: Sequence[keras.Variable],
) -> list[Gradient]:
    """Send all that the residuals hold, and empty them.

    Nothing is selected or rounded. Each `shared` variable is summed as well,
    and every replica keeps an N-th of its sum. The others are as above.

    Returns:
        The sums over all replicas, first of the residuals, then of the other
        gradients.
    """
    count, end = len(residuals), len(residuals) + len(shared)
    held = [residual.everything() for residual in residuals]
    held += [tf.identity(own_component(variable)) for variable in shared]
    _, sums = GatheredExchange(wire, [], []).sum([], [*held, *others])
    for residual in residuals:
        residual.empty()
    for variable, total in zip(shared, sums[count:end], strict=True):
        own_component(variable).assign(total / wire.replicas)
    return [*sums[:count], *sums[end:]]


def _multiplied(update: Gradient, unit: tf.Tensor) -> Gradient:
    """Return an update whose values were in multiples of a unit."""
    if not isinstance(update, tf.IndexedSlices):
        return unit * update
    values = unit * tf.cast(update.values, unit.dtype)
    return tf.IndexedSlices(values, update.indices, update.dense_shape)
