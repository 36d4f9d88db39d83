"""Dense values that travel with the entries, and are summed where they arrive.

    worker 0                       worker 1
    entries, biases                entries, biases
        └──────────── all-gather ──────┘
    entries of all, biases of 0 + biases of 1: the same on both

They cost no round of their own then, but N - 1 times their bytes.
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_optimizers._compat.instance_keys import DTYPES
from tf_optimizers.distribute.words import WordReader

# What a round costs, in bytes: what 1 Gbit/s carries in a round trip of 1 ms,
# or 100 Mbit/s in one of 10 ms. Neither is measured at the start of a training,
# since a wrong choice costs little: these bytes twice, or two rounds.
ROUND_BYTES = 1 << 17


def is_gathered(values: Sequence[tf.Tensor], replicas: int) -> bool:
    """Tell whether values of one dtype are gathered, and summed locally.

    N - 1 times their bytes must be worth the two rounds that a sum of its own
    takes. On CPUs the sum is the same to the bit: both are `tf.add_n`'s.
    """
    sizes = [value.shape.num_elements() for value in values]
    if None in sizes or values[0].dtype not in DTYPES:
        return False
    bytes_sent = (replicas - 1) * sum(sizes) * values[0].dtype.size
    return 0 < bytes_sent <= 2 * ROUND_BYTES


def join(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the elements of tensors of one dtype and known shape."""
    return tf.concat([tf.reshape(value, [-1]) for value in values], 0)


def sum_replicas(
    words: WordReader, values: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Sum what all replicas have joined, in the order of `tf.add_n`.

    Args:
        words: Which have it next.
        values: This replica's, for dtype and shapes.
    """
    sizes = [value.shape.num_elements() for value in values]
    every = words.read(values[0].dtype, [sum(sizes)])
    # `reduce_sum` adds in an order that depends on the number of cores.
    total = tf.add_n(tf.unstack(every))
    return [
        tf.reshape(part, value.shape)
        for part, value in zip(tf.split(total, sizes), values, strict=True)
    ]
