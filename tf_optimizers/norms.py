"""L2 norms that neither overflow, underflow nor lose digits to their length.

Squares are taken and summed in float64. A norm is finite and exact to
float32 wherever the elements are: the square of 1e-25 is 0 in float32, that of
1e20 is inf, and XLA's float32 sum of 20 million equal squares is off by more
than 1e-4.
"""

import tensorflow as tf

from tf_optimizers.kernels import compiled

# Rows are added with vector instructions; more of them, and XLA no longer
# unrolls the sum.
_ROWS = 8
# Below this a second kernel costs more than the vector instructions save.
_SMALL = 4096


def partial_squares(tensor: tf.Tensor) -> tf.Tensor:
    """Return sums of squares that add up to the squared norm, as float64.

    To be called inside the XLA kernel that computes `tensor`, and finished by
    `tf.reduce_sum` outside: XLA does not vectorise a reduction to a scalar.
    """
    squares = tf.square(tf.cast(tf.reshape(tensor, [-1]), tf.float64))
    if squares.shape[0] < _SMALL:
        return tf.reduce_sum(squares, keepdims=True)
    end = squares.shape[0] // _ROWS * _ROWS
    sums = tf.reduce_sum(tf.reshape(squares[:end], [_ROWS, -1]), axis=0)
    return tf.concat([sums, squares[end:]], axis=0)


def norm(tensor: tf.Tensor) -> tf.Tensor:
    """Return the L2 norm of all elements, a scalar of the tensor's dtype."""
    squares = compiled(partial_squares, tensor.shape, tensor.dtype)(tensor)
    return tf.cast(tf.sqrt(tf.reduce_sum(squares)), tensor.dtype)
