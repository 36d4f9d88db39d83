"""How entries travel: as what, in how many bytes, and when not as entries.

In a ring of N replicas, each passes on the entries of all but one, N - 1
shares in all. The sum of dense tensors costs each 2 (N - 1) / N tensors,
however many entries are not 0. So entries of S bytes travel densely if

    N S > 2 (bytes of the dense tensor)

which depends on nothing that replicas do not have in common.

The devices of a host have one memory in common, each a copy of it: their
gradients are summed before it is compressed, and each sends a share of its
entries.

    host 0: g_0 + g_1                 host 1: g_2 + g_3
        k entries of the same v           k entries
      device 0      device 1            device 0      device 1
    the first k/2  the others         the first k/2  the others
"""

from typing import NamedTuple

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.distribute.entries import SortedEntries, packed_bytes
from tf_optimizers.distribute.strategy import SparseMultiWorkerMirroredStrategy
from tf_optimizers.replicas import place_among


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
        is_packed = isinstance(strategy, SparseMultiWorkerMirroredStrategy)
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

    def share(self, selected: int) -> int:
        """Return how many of the entries of a memory a replica sends."""
        return -(-selected // self.devices)

    def own_share(self, selected: tf.Tensor) -> tf.Tensor:
        """Return this replica's part of what was selected; zeros come first."""
        if self.devices == 1:
            return selected
        count = self.share(selected.shape[0])
        missing = count * self.devices - selected.shape[0]
        start = count * place_among(self.devices)
        return tf.pad(selected, [[missing, 0]])[start : start + count]

    def is_dense(self, size: int, count: int) -> bool:
        """Tell whether `count` of `size` entries travel as a dense tensor."""
        entries = self.replicas * self._entry_bytes(size, count)
        return entries > 2 * size * tf.float32.size

    def sent_bytes(self, size: int, count: int) -> int:
        """Return what `count` of the `size` entries of a variable take."""
        if self.is_dense(size, count):
            return size * tf.float32.size
        return self._entry_bytes(size, count)

    def message(
        self, entries: SortedEntries, shape: tf.TensorShape
    ) -> Gradient:
        """Return the entries as they travel, those of a variable's shape."""
        size, count = shape.num_elements(), entries.values.shape[0]
        if not self.is_dense(size, count):
            return entries
        values = tf.cast(entries.values, tf.float32)
        where = entries.indices[:, tf.newaxis]
        return tf.reshape(tf.scatter_nd(where, values, [size]), shape)

    def _entry_bytes(self, size: int, count: int) -> int:
        if self.is_packed:
            return packed_bytes(size, count, self.carrier_dtype)
        return count * (self.carrier_dtype.size + position_dtype(size).size)


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
