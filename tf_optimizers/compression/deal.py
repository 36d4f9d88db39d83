"""The entries of several variables, summed and chosen again by owners.

selected ── to the owner of each, as many as it has room for ── all_reduce
   │                                                              │
   └──── taken out of u and v if they fitted and arrived ─────────┘
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_optimizers.base.replicas import local_rank
from tf_optimizers.compression.selection import Selection
from tf_optimizers.compression.wire import Wire, position_dtype
from tf_optimizers.distribute.owners import Owners
from tf_optimizers.distribute.reduce_scatter import (
    DealtEntries,
    fill,
    rising,
    slots_of,
)


class Deal:
    """What a replica sends of some selections, and what comes of them.

    Args:
        selections: Of several variables.
        owners: Who owns what of them.
        wire: How entries travel.
    """

    def __init__(
        self, selections: Sequence[Selection], owners: Owners, wire: Wire
    ) -> None:
        self._selections = selections
        self._owners = owners
        self._places = owners.places([s.positions for s in selections])
        order = rising(self._places)
        places = tf.gather(self._places, order)
        values = tf.gather(tf.concat([s.values for s in selections], 0), order)
        room = wire.room([s.values.shape[0] for s in selections])
        owner = tf.cast(places // owners.span, tf.int32)
        slots = slots_of(
            tf.cast(values, tf.float32), owner, [room] * owners.replicas
        )
        count = room * owners.replicas
        fits = tf.cast(slots < count, tf.int32)
        self._fits = tf.scatter_nd(order[:, tf.newaxis], fits, fits.shape) > 0
        self.message = DealtEntries(
            self._own_rows(fill(slots, values, count), wire),
            self._own_rows(fill(slots, places % owners.span, count), wire),
            owners,
        )

    def results(
        self, received: tf.IndexedSlices
    ) -> tuple[list[tf.IndexedSlices], list[Selection]]:
        """Return the sums of each variable, and what this replica gave.

        Args:
            received: What the reduction made of `message`.
        """
        owners = self._owners
        values, places = (
            tf.reshape(part, [owners.replicas, -1])
            for part in (received.values, received.indices)
        )
        places += owners.first_places
        sums = [
            tf.IndexedSlices(
                value, tf.cast(position, position_dtype(size)), [size]
            )
            for value, position, size in zip(
                owners.split(values),
                owners.positions(places),
                owners.sizes,
                strict=True,
            )
        ]
        nowhere = tf.constant(-1, places.dtype)
        arrived = tf.where(values == 0, nowhere, places)
        arrived = tf.sort(tf.reshape(arrived, [-1]))
        nearest = tf.searchsorted(arrived[:-1], self._places)
        given = (tf.gather(arrived, nearest) == self._places) & self._fits
        counts = [s.values.shape[0] for s in self._selections]
        return sums, [
            s._replace(values=tf.where(mask, s.values, tf.zeros_like(s.values)))
            for s, mask in zip(
                self._selections, tf.split(given, counts), strict=True
            )
        ]

    def _own_rows(self, slots: tf.Tensor, wire: Wire) -> tf.Tensor:
        """Return this replica's of its host's slots: [N, capacity]."""
        rows = tf.reshape(slots, [self._owners.replicas, wire.devices, -1])
        return rows[:, local_rank(wire.devices)]
