"""Which replica owns which entries of several flattened tensors.

Groups of N consecutive positions have one entry for each of N owners, and are
numbered through all tensors. In every group the owners are rotated, so that
what is regular (a dead column) is not all of one owner. Of 3:

    position    0  1  2    3  4  5    6  7  8    9
    group          0          1          2       3
    owner       0  1  2    1  2  0    2  0  1    1

An entry's place is its owner times the span of groups, plus its group: an
owner's places follow one another, in the order of tensors and positions.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_optimizers.distribute.entries import BLOCK

# Knuth's multiplicative hash: 2^32 divided by the golden ratio.
_FACTOR = 2654435761


class Owners(NamedTuple):
    """Who owns what.

    Args:
        sizes: Of the tensors, in elements.
        kept: How many sums of each tensor an owner keeps.
        replicas: Their number, N, each of whom is an owner.
    """

    sizes: tuple[int, ...]
    kept: tuple[int, ...]
    replicas: int

    @property
    def first_groups(self) -> np.ndarray:
        """The number of each tensor's first group, and of all groups."""
        groups = (-(-size // self.replicas) for size in self.sizes)
        return np.array([*itertools.accumulate(groups, initial=0)], "int64")

    @property
    def span(self) -> int:
        """Places of an owner: groups, filled up to whole blocks."""
        return -(-int(self.first_groups[-1]) // BLOCK) * BLOCK

    @property
    def first_places(self) -> np.ndarray:
        """The first place of each owner, [N, 1]."""
        owners = np.arange(self.replicas, dtype="int64")
        return self.span * owners[:, np.newaxis]

    def places(self, positions: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the places of entries, int64 [all].

        Args:
            positions: int [entries] of each tensor.
        """
        flat = tf.concat([tf.cast(p, tf.int64) for p in positions], 0)
        sizes = [part.shape[0] for part in positions]
        group = flat // self.replicas + np.repeat(self.first_groups[:-1], sizes)
        owner = (flat + _rotation(group)) % self.replicas
        return owner * self.span + group

    def positions(self, places: tf.Tensor) -> list[tf.Tensor]:
        """Return the positions of entries, int64 [N * kept] of each tensor.

        Args:
            places: int64 [N, sum of kept], of each owner those of each tensor.
        """
        owner, group = places // self.span, places % self.span
        inside = (owner - _rotation(group)) % self.replicas
        first = np.repeat(self.first_groups[:-1], self.kept)
        flat = (group - first) * self.replicas + inside
        return self.split(flat)

    def split(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Return the part of each tensor, flat, of [N, sum of kept]."""
        parts = tf.split(tensor, self.kept, axis=1)
        return [tf.reshape(part, [-1]) for part in parts]


def _rotation(group: tf.Tensor) -> tf.Tensor:
    """Return a number below 2^16 that looks like chance."""
    return group * _FACTOR // (1 << 16) % (1 << 16)
