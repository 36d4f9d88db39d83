"""Chooses how entries are encoded, and counts their bytes.

The devices of a worker have one residual in common, each a copy of it: their
gradients are summed before it is compressed, and each sends a share of its
entries.

    worker 0: g_0 + g_1               worker 1: g_2 + g_3
        k entries of the same v           k entries
      device 0      device 1            device 0      device 1
    the first k/2  the others         the first k/2  the others
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers.codes.entries import CODES, narrow_indices, packed_bits
from tf_optimizers.codes.positions import position_dtype
from tf_optimizers.replicas import replicas_of

# The bits of a float32 that hold its exponent.
_EXPONENT = 0x7F800000


class Wire(NamedTuple):
    """How entries travel under a strategy."""

    replicas: int  # Their number, N.
    value_dtype: str  # What values are rounded to, as in codes/entries.py.
    is_packed: bool  # Entries take few bits, and all travels together.
    devices: int = 1  # The replicas of a worker that share a residual.

    @classmethod
    def under(cls, strategy: tf.distribute.Strategy, dtype: str) -> "Wire":
        """Return the wire of a strategy."""
        group = replicas_of(strategy)
        # On a single worker there is no slow network to compress for.
        is_shared = group.packs_entries and group.workers > 1
        devices = len(group.devices) if is_shared else 1
        return cls(group.count, dtype, group.packs_entries, devices)

    @property
    def carrier_dtype(self) -> tf.DType:
        """What values travel as if TensorFlow gathers them.

        It cannot gather bfloat16, and has no codes.
        """
        is_half = self.value_dtype == "float16"
        return tf.float16 if is_half else tf.float32

    def unit(self, rate: tf.Tensor) -> tf.Tensor | None:
        """Return the unit of values that grow with a rate.

        It is the largest power of two up to the rate, or 1 if that is 0: all
        replicas know it, and dividing by it is exact. None where none can
        vanish, as values are not rounded, or to parts of a scale of theirs.
        """
        if self.value_dtype not in ("float16", "bfloat16"):
            return None
        exponent = tf.bitcast(tf.cast(rate, tf.float32), tf.int32)
        exponent = tf.bitwise.bitwise_and(exponent, _EXPONENT)
        power = tf.bitcast(exponent, tf.float32)
        is_right = (power > 0) & tf.math.is_finite(power)
        return tf.where(is_right, power, tf.ones_like(power))

    def shares(self, selected: tf.Tensor, fill: int = 0) -> tf.Tensor:
        """Return the part of each device, [devices, n]; `fill` comes first."""
        count = self._share(selected.shape[0])
        if self.devices == 1:  # A reshape is free.
            return tf.reshape(selected, [1, count])
        missing = count * self.devices - selected.shape[0]
        filled = tf.pad(selected, [[missing, 0]], constant_values=fill)
        return tf.reshape(filled, [self.devices, count])

    def own_share(self, shares: tf.Tensor) -> tf.Tensor:
        """Return this replica's part."""
        if self.devices == 1:
            return tf.reshape(shares, [-1])
        return shares[replicas_of().rank % self.devices]

    def joined(self, shares: tf.Tensor, count: int) -> tf.Tensor:
        """Return what `count` selected were, of `shares`."""
        flat = tf.reshape(shares, [-1])
        return flat if self.devices == 1 else flat[-count:]

    def rounded(
        self,
        values: Sequence[tf.Tensor],
        positions: Sequence[tf.Tensor],
        ends: Sequence[Sequence[int]] = (),
    ) -> list[tf.Tensor]:
        """Return values as they arrive, [rows, n] of each variable.

        Args:
            values: float32 [rows, n].
            positions: int [rows, n], -1 where nothing is sent.
            ends: See `Entries`.
        """
        return CODES[self.value_dtype].round(values, positions, ends)

    def entry_bits(self, size: int, count: int) -> int:
        """Return what a replica sends of `count` selected of `size` entries."""
        count = self._share(count)
        if self.is_packed:
            return packed_bits(size, count, self.value_dtype)
        pair = self.carrier_dtype.size + position_dtype(size).size
        return 8 * count * pair

    def row_bytes(self, gradient: tf.IndexedSlices) -> int:
        """Return what a row of a sparse gradient takes, with its index."""
        indices = gradient.indices
        if self.is_packed:
            indices = narrow_indices(gradient)
        width = gradient.values.shape[1:].num_elements()
        return gradient.values.dtype.size * width + indices.dtype.size

    def _share(self, count: int) -> int:
        """Return how many of the entries of a residual a replica sends."""
        return -(-count // self.devices)


class Selection(NamedTuple):
    """The entries of one residual that are to be sent, by rising position."""

    values: tf.Tensor  # float32 [k], in units; the devices' share in all.
    positions: tf.Tensor  # int [k], in the flattened variable; first some -1.
    shape: tf.TensorShape  # Of the variable.


class Exchange:
    """How the selections of some variables come together.

    Args:
        wire: How entries travel.
        sizes: Of the variables, in elements.
        counts: How many entries of each are selected.
    """

    def __init__(
        self, wire: Wire, sizes: Sequence[int], counts: Sequence[int]
    ) -> None:
        self.wire = wire
        self.sizes = sizes
        self.counts = counts

    def sum(
        self, selections: Sequence[Selection], others: Sequence[Gradient]
    ) -> tuple[list[tf.Tensor], list[Gradient]]:
        """Sum selected entries, and other gradients, over all replicas.

        Returns:
            What was sent of each selection, float32 [k], 0 where nothing was;
            the sums of theirs, `tf.IndexedSlices` of the flattened variables
            or dense, and of the others.
        """
        raise NotImplementedError

    def sent_bytes(self) -> list[int]:
        """Return what the selected entries of each variable take."""
        raise NotImplementedError
