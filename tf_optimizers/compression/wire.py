"""Describes how entries are sent, and counts their bytes.

Under `tfo.SparseMultiWorkerMirroredStrategy` with several workers, the devices
of a worker share the residual v of a variable, the values that are not sent
yet: each device holds an equal fraction of v. The devices sum their gradients
before compression. Then each device sends a portion of the entries:

    worker 0: g_0 + g_1               worker 1: g_2 + g_3
        k entries of its v                k entries of its v
      device 0      device 1            device 0      device 1
    the first k/2  the others         the first k/2  the others
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_optimizers.codes.entries import narrow_indices, packed_bits
from tf_optimizers.codes.positions import position_dtype
from tf_optimizers.replicas import replicas_of

# The bits of a float32 that hold its exponent.
_EXPONENT = 0x7F800000


class Wire(NamedTuple):
    """How entries are sent under a strategy.

    Args:
        replicas: Number of replicas, N.
        value_dtype: The format of sent values, a key of `CODES`.
        is_packed: Whether entries are packed into few bits, and the entries of
            all variables are sent in one message.
        devices: Number of replicas that share a residual, all on one worker.
            Defaults to `1`.
    """

    replicas: int
    value_dtype: str
    is_packed: bool
    devices: int = 1

    @classmethod
    def under(cls, strategy: tf.distribute.Strategy, dtype: str) -> "Wire":
        """Return the `Wire` of a strategy."""
        group = replicas_of(strategy)
        # Sharing a residual saves traffic only between workers.
        is_shared = group.packs_entries and group.workers > 1
        devices = len(group.devices) if is_shared else 1
        return cls(group.count, dtype, group.packs_entries, devices)

    @property
    def carrier_dtype(self) -> tf.DType:
        """The dtype in which values are sent if they are not packed.

        TensorFlow cannot gather bfloat16, or dtypes of fewer than 8 bits.
        """
        is_half = self.value_dtype == "float16"
        return tf.float16 if is_half else tf.float32

    def unit(self, rate: tf.Tensor) -> tf.Tensor | None:
        """Return the number to divide values by before they are sent, or None.

        Values are proportional to `rate`, so at a low rate, float16 and
        bfloat16 values could become 0. The unit is the largest power of two up
        to the rate, or 1 if the rate is 0, denormal or not finite. Division by
        a power of two adds no rounding error, and all replicas compute the same
        unit. With other formats, the unit is None.
        """
        if self.value_dtype not in ("float16", "bfloat16"):
            return None
        exponent = tf.bitcast(tf.cast(rate, tf.float32), tf.int32)
        exponent = tf.bitwise.bitwise_and(exponent, _EXPONENT)
        power = tf.bitcast(exponent, tf.float32)
        is_valid = (power > 0) & tf.math.is_finite(power)
        return tf.where(is_valid, power, tf.ones_like(power))

    def portions(self, selected: tf.Tensor, fill: int = 0) -> tf.Tensor:
        """Return the portion that each device sends, [devices, n].

        Pad the selected entries in front with `fill`, so that all portions have
        the same length.
        """
        count = self._portion(selected.shape[0])
        if self.devices == 1:  # A reshape costs nothing.
            return tf.reshape(selected, [1, count])
        missing = count * self.devices - selected.shape[0]
        filled = tf.pad(selected, [[missing, 0]], constant_values=fill)
        return tf.reshape(filled, [self.devices, count])

    def own_portion(self, portions: tf.Tensor) -> tf.Tensor:
        """Return the portion that this replica sends, flattened.

        `portions` is [devices, n], or several such matrices, stacked.
        """
        if self.devices > 1:
            own = replicas_of().rank % self.devices
            portions = portions[own :: self.devices]
        return tf.reshape(portions, [-1])

    def joined(self, portions: tf.Tensor, count: int) -> tf.Tensor:
        """Undo `portions`: return the `count` selected values."""
        flat = tf.reshape(portions, [-1])
        return flat if self.devices == 1 else flat[-count:]

    def entry_bits(self, size: int, count: int) -> int:
        """Return the bits that a replica sends for `count` selected entries."""
        count = self._portion(count)
        if self.is_packed:
            return packed_bits(size, count, self.value_dtype)
        pair = self.carrier_dtype.size + position_dtype(size).size
        return 8 * count * pair

    def row_bytes(self, gradient: tf.IndexedSlices) -> int:
        """Return the bytes of a row of a sparse gradient, with its index."""
        indices = gradient.indices
        if self.is_packed:
            indices = narrow_indices(gradient)
        width = gradient.values.shape[1:].num_elements()
        return gradient.values.dtype.size * width + indices.dtype.size

    def _portion(self, count: int) -> int:
        """Return how many of `count` entries a replica sends, rounded up."""
        return -(-count // self.devices)


class Selection(NamedTuple):
    """The selected entries of one residual, by increasing position.

    Args:
        values: float32 [k]. The sums over the worker's devices, divided by
            `Wire.unit`.
        positions: int [k], in the flattened variable. -1 means that there is no
            entry; such positions come first.
        shape: Shape of the variable.
    """

    values: tf.Tensor
    positions: tf.Tensor
    shape: tf.TensorShape


@dataclasses.dataclass
class Exchange:
    """A way to sum selected entries of variables over all replicas.

    Subclasses define:
        sum(selections, others): Sums selected entries, and other gradients.
            Returns two lists. The first has the sent values of each selection,
            float32 [k], 0 where nothing was sent. The second has the sums of
            the entries, dense or as `tf.IndexedSlices` of flattened variables,
            followed by the sums of the other gradients.
        sent_bytes(): Returns the bytes that a replica sends for each variable.
        peer_bytes: The cost of an exchange with one other replica, in bytes.

    Args:
        wire: How entries are sent.
        sizes: Number of elements of each variable.
        counts: Number of selected entries of each variable.
    """

    wire: Wire
    sizes: Sequence[int]
    counts: Sequence[int]
