"""How many bytes of sparse gradients a replica has sent."""

from typing import Any

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.replicas import plain_variable
from tf_optimizers.base.replicas import components, local_rank, own_component
from tf_optimizers.compression.wire import Wire


class SentRows:
    """Counts the bytes of gradients that are `tf.IndexedSlices`.

    Which are is seen when a step is traced; how many rows they have, in every
    step. Of several replicas of a process, the first one counts.

    Args:
        wire: How they travel.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._bytes: dict[int, tf.Variable] = {}

    def count(self, index: int, gradient: Gradient, variable: Any) -> None:
        """Note what this step sends of a variable, from its replica."""
        if not isinstance(gradient, tf.IndexedSlices):
            self._bytes.pop(index, None)
            return
        if local_rank(len(components(variable))):
            return
        if index not in self._bytes:
            with tf.init_scope(), tf.device(own_component(variable).device):
                self._bytes[index] = plain_variable(
                    tf.zeros([], tf.int64), trainable=False
                )
        rows = tf.size(gradient.indices, tf.int64)
        self._bytes[index].assign(rows * self._wire.row_bytes(gradient))

    def __contains__(self, index: int) -> bool:
        """Tell whether the gradient of a variable was sparse when traced."""
        return index in self._bytes

    def sent(self) -> dict[int, int]:
        """Return the bytes of the last step, by position of the variable."""
        return {
            index: int(tf.convert_to_tensor(size))
            for index, size in self._bytes.items()
        }
