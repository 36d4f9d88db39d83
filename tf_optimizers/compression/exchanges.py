"""Sums entries by gathering them, or chooses an exchange by shards.

`GatheredExchange` sends each variable as entries or as a dense tensor. The
entries of a replica take S bytes, or D bytes as a dense tensor. In a ring of N
replicas, an all-gather of entries costs each replica (N - 1) S bytes, because
each replica forwards the entries of the others. An all-reduce of dense tensors
costs each replica 2 D (N - 1) / N bytes, even if most elements are 0. Entries
are therefore sent as a dense tensor if N S > 2 D. All replicas know the same N,
S and D, so they make the same choice.
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.codes.entries import Entries, whole_bytes
from tf_optimizers.codes.layout import Layout
from tf_optimizers.codes.values import CODES
from tf_optimizers.compression.sharded_exchange import ShardedExchange
from tf_optimizers.compression.wire import Exchange, Selection, Wire
from tf_optimizers.replicas import replicas_of

_DENSE_BITS = 8 * tf.float32.size


class GatheredExchange(Exchange):
    """Every replica gathers the selected entries of all replicas."""

    @property
    def peer_bytes(self) -> float:
        """The cost of an exchange with one other replica, in bytes."""
        # A dense sum sends 2 D / N bytes to every other replica, where D is the
        # size of a dense tensor. Count only D / N, because a dense sum needs no
        # sorting, while shards do.
        return sum(self._bits(self.wire.replicas)) / 8

    @functools.cached_property
    def _entry_bits(self) -> list[int]:
        return list(map(self.wire.entry_bits, self.sizes, self.counts))

    def is_dense(self, i: int) -> bool:
        """Return whether the i-th variable is sent as a dense tensor."""
        entries = self.wire.replicas * self._entry_bits[i]
        return entries > 2 * _DENSE_BITS * self.sizes[i]

    def _bits(self, parts: int = 1) -> list[int]:
        """Return the bits of each variable: D / `parts` if dense, else S."""
        return [
            _DENSE_BITS * self.sizes[i] // parts if self.is_dense(i) else bits
            for i, bits in enumerate(self._entry_bits)
        ]

    def sent_bytes(self) -> list[int]:
        """Return the bytes that a replica sends for each variable."""
        bits = self._bits()
        return (
            whole_bytes(bits) if self.wire.is_packed else [b // 8 for b in bits]
        )

    def sum(
        self, selections: Sequence[Selection], others: Sequence[Gradient]
    ) -> tuple[list[tf.Tensor], list[Gradient]]:
        """Sum selected entries and other gradients.

        Every selected entry is sent, perhaps rounded to 0.
        """
        if not selections:
            return [], replicas_of().gather_and_sum(others)
        wire = self.wire
        positions = [wire.portions(s.positions, -1) for s in selections]
        values = [wire.portions(s.values) for s in selections]
        values = CODES[wire.value_dtype].round(values, Layout(positions))
        messages, sent = [], []
        for i, selection in enumerate(selections):
            own = selection._replace(
                values=wire.own_portion(values[i]),
                positions=wire.own_portion(positions[i]),
            )
            messages.append(self._message(i, own))
            every = wire.joined(values[i], self.counts[i])
            sent.append(tf.cast(every, tf.float32))
        return sent, replicas_of().gather_and_sum([*messages, *others])

    def _message(self, i: int, own: Selection) -> Entries | tf.Tensor:
        values, positions, shape = own
        size = self.sizes[i]
        if self.is_dense(i):
            values = tf.cast(values, tf.float32)
            places = tf.maximum(positions, 0)[:, tf.newaxis]
            return tf.reshape(tf.scatter_nd(places, values, [size]), shape)
        if not self.wire.is_packed:
            values = tf.cast(values, self.wire.carrier_dtype)
        return Entries(values, positions, size, self.wire.value_dtype)


# Shards are used only if they divide the cost by more than this factor. With 0,
# they are used wherever they are supported.
LEAST_SAVING = 2.0
# The fixed cost of a message to one replica, as a number of bytes. A message
# takes at least 2.5 ms (measured), as long as about 32 KiB at 100 Mbit/s.
_MESSAGE_COST = 1 << 15


def choose_exchange(
    wire: Wire, sizes: Sequence[int], counts: Sequence[int]
) -> GatheredExchange | ShardedExchange:
    """Return the cheaper exchange for the entries of some variables.

    Only `tfo.SparseMultiWorkerMirroredStrategy` supports shards.

    With `GatheredExchange`, a replica sends its K entries to each of N - 1
    replicas, so the cost grows with N. With `ShardedExchange`, a replica sends
    only about K / N entries and then K / N sums to each of them, so the cost
    hardly grows. But shards take two messages instead of one, and only the
    largest sums are sent. So shards are used only if they more than halve the
    cost of sending to one other replica. In bytes, with M = 32,768 per message,
    this means

        (all entries) + M > 2 (entries for one shard + its sums + 2 M)

    Args:
        wire: How entries are sent.
        sizes: Number of elements of each variable.
        counts: Number of selected entries of each variable.
    """
    gathered = GatheredExchange(wire, sizes, counts)
    if not wire.is_packed or not sizes:
        return gathered
    sharded = ShardedExchange(wire, sizes, counts)
    by_shards = LEAST_SAVING * (sharded.peer_bytes + 2 * _MESSAGE_COST)
    if gathered.peer_bytes + _MESSAGE_COST > by_shards:
        return sharded
    return gathered
