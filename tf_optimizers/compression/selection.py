"""What is taken out of a memory, to be sent."""

from typing import NamedTuple

import tensorflow as tf


class Selection(NamedTuple):
    """The entries of one variable that are to be sent, by rising position.

    Args:
        values: [k], as they are sent; 0 if nothing is, and v keeps all.
        positions: int [k], in the flattened variable.
        rest: float32 [k], what v keeps of each that is sent.
        shape: Of the variable.
    """

    values: tf.Tensor
    positions: tf.Tensor
    rest: tf.Tensor
    shape: tf.TensorShape
