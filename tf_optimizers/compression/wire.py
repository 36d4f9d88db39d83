"""How entries travel: as what, in how many bytes, and when not as entries.

In a ring of N replicas, each passes on the entries of all but one, N - 1
shares in all. The sum of dense tensors costs each 2 (N - 1) / N tensors,
however many entries are not 0. So entries of S bytes travel densely if

    N S > 2 (bytes of the dense tensor)

which depends on nothing that replicas do not have in common.

Many replicas have owners of entries; see distribute/reduce_scatter.py. Of K
entries in all, each replica sends some K / N to every other one, and then as
many sums, however many replicas there are. As these are two messages instead
of one, and sums are selected again, owners are for those who thereby save half
of the bytes, of which a message, whatever is in it, counts M = 32,768:

    (all entries) + M > 2 (entries for one + its sums + 2 M)

The devices of a host have one memory in common, each a copy of it: their
gradients are summed before it is compressed, and each sends a share of its
entries.

    host 0: g_0 + g_1                 host 1: g_2 + g_3
        k entries of the same v           k entries
      device 0      device 1            device 0      device 1
    the first k/2  the others         the first k/2  the others
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.base.replicas import local_rank
from tf_optimizers.compression.selection import Selection
from tf_optimizers.distribute.entries import (
    SortedEntries,
    narrow_indices,
    packed_bytes,
)
from tf_optimizers.distribute.kind import is_sparse_multi_worker
from tf_optimizers.distribute.owners import Owners

_DENSE = tf.float32.size

# So many times the bytes of owners must the usual ones be, a message counting
# as many as 100 Mbit/s carry while it is on its way: 2.5 ms, as measured.
_WORTH = 2
_MESSAGE = 1 << 15


class Wire(NamedTuple):
    """How entries travel under a strategy.

    Args:
        replicas: Their number, N.
        value_dtype: What values are rounded to.
        is_packed: Whether positions take 2 bytes, and all travels together.
        devices: The replicas of a host, if they share a memory, or 1.
    """

    replicas: int
    value_dtype: tf.DType
    is_packed: bool
    devices: int = 1

    @classmethod
    def under(cls, strategy: tf.distribute.Strategy, dtype: str) -> "Wire":
        """Return the wire of a strategy."""
        is_packed = is_sparse_multi_worker(strategy)
        replicas = strategy.num_replicas_in_sync
        hosts = strategy.extended.workers if is_packed else 1
        # On a single host there is no slow network to compress for.
        devices = replicas // hosts if hosts > 1 else 1
        return cls(replicas, tf.as_dtype(dtype), is_packed, devices)

    @property
    def memories(self) -> int:
        """How many there are that differ: of hosts, or of replicas."""
        return self.replicas // self.devices

    @property
    def carrier_dtype(self) -> tf.DType:
        """What values travel as: TensorFlow cannot gather bfloat16."""
        if self.value_dtype == tf.bfloat16 and not self.is_packed:
            return tf.float32
        return self.value_dtype

    def own_share(self, selected: tf.Tensor) -> tf.Tensor:
        """Return this replica's part of what was selected; zeros come first."""
        if self.devices == 1:
            return selected
        count = self._share(selected.shape[0])
        missing = count * self.devices - selected.shape[0]
        start = count * local_rank(self.devices)
        return tf.pad(selected, [[missing, 0]])[start : start + count]

    def owners(
        self, sizes: Sequence[int], counts: Sequence[int]
    ) -> Owners | None:
        """Return who sums the entries of variables, if that is worth it.

        Args:
            sizes: Of the variables.
            counts: How many entries of each are selected.
        """
        if not self.is_packed or not sizes:
            return None
        kept = tuple(-(-count // self.replicas) for count in counts)
        owners = Owners(tuple(sizes), kept, self.replicas)
        # Dense tensors count half: it takes no sorting to sum them.
        usual = sum(
            min(self._entry_bytes(size, count), _DENSE * size / self.replicas)
            for size, count in zip(sizes, counts, strict=True)
        )
        dealt = sum(self._dealt_bytes(owners, counts))
        return owners if self.is_worth(usual, dealt) else None

    def is_worth(self, usual: float, dealt: float) -> bool:
        """Tell whether to deal so many bytes, instead of the usual ones."""
        return usual + _MESSAGE > _WORTH * (dealt + 2 * _MESSAGE)

    def room(self, counts: Sequence[int]) -> int:
        """Return how many entries an owner takes of a memory, at most.

        As many as it should get if places were dealt by chance, and three
        deviations.
        """
        mean = sum(counts) / self.replicas
        capacity = math.ceil((mean + 3 * math.sqrt(mean)) / self.devices)
        # Even, so that rows of half precision are whole words.
        return (capacity + capacity % 2) * self.devices

    def is_dense(self, size: int, count: int) -> bool:
        """Tell whether `count` of `size` entries travel as a dense tensor."""
        entries = self.replicas * self._entry_bytes(size, count)
        return entries > 2 * _DENSE * size

    def sent_bytes(
        self, sizes: Sequence[int], counts: Sequence[int]
    ) -> list[int]:
        """Return what the selected entries of each variable take."""
        owners = self.owners(sizes, counts)
        if owners is None:
            return [
                _DENSE * size
                if self.is_dense(size, count)
                else self._entry_bytes(size, count)
                for size, count in zip(sizes, counts, strict=True)
            ]
        to_one, sums = self._dealt_bytes(owners, counts)
        total = self.replicas * to_one + sums
        # They have rows in common: each takes its part.
        ends = [
            total * end // sum(counts)
            for end in itertools.accumulate(counts, initial=0)
        ]
        return [end - start for start, end in itertools.pairwise(ends)]

    def row_bytes(self, gradient: tf.IndexedSlices) -> int:
        """Return what a row of a sparse gradient takes, with its index."""
        indices = gradient.indices
        if self.is_packed:
            indices = narrow_indices(gradient)
        width = gradient.values.shape[1:].num_elements()
        return gradient.values.dtype.size * width + indices.dtype.size

    def message(self, selection: Selection, shape: tf.TensorShape) -> Gradient:
        """Return a variable's entries as they travel without owners.

        Returns:
            `SortedEntries` of the flattened variable, first of all zeros at
            position 0 if fewer are sent; or a dense tensor.
        """
        size, count = shape.num_elements(), selection.values.shape[0]
        values, positions = map(
            self.own_share, (selection.values, selection.positions)
        )
        if not self.is_dense(size, count):
            values = tf.cast(values, self.carrier_dtype)
            return SortedEntries(values, positions, tf.constant([size]))
        values = tf.cast(values, tf.float32)
        where = positions[:, tf.newaxis]
        return tf.reshape(tf.scatter_nd(where, values, [size]), shape)

    def _share(self, count: int) -> int:
        """Return how many of the entries of a memory a replica sends."""
        return -(-count // self.devices)

    def _entry_bytes(self, size: int, count: int) -> int:
        """Return what a replica sends of `count` selected ones."""
        count = self._share(count)
        if self.is_packed:
            return packed_bytes(size, count, self.carrier_dtype)
        return count * (self.carrier_dtype.size + position_dtype(size).size)

    def _dealt_bytes(
        self, owners: Owners, counts: Sequence[int]
    ) -> tuple[int, int]:
        """Return what a replica sends to one owner, and what it keeps."""
        capacity = self.room(counts) // self.devices
        return (
            packed_bytes(owners.span, capacity, self.value_dtype),
            packed_bytes(owners.span, sum(owners.kept), tf.float32),
        )


def position_dtype(size: int) -> tf.DType:
    """Return the integers that positions are held as."""
    return tf.int32 if size <= tf.int32.max else tf.int64


def rounded(values: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the values in another dtype, and what is missing of them.

    Finite values beyond the range become the largest there is. Of what is not
    finite nothing is missing.
    """
    if dtype == values.dtype:
        return values, tf.zeros_like(values)
    limit = tf.cast(dtype.max, values.dtype)
    is_finite = tf.math.is_finite(values)
    inside = tf.where(
        is_finite, tf.clip_by_value(values, -limit, limit), values
    )
    sent = tf.cast(inside, dtype)
    missing = values - tf.cast(sent, values.dtype)
    return sent, tf.where(is_finite, missing, tf.zeros_like(values))
