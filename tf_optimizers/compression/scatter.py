"""Entries of a variable, changed in place by XLA.

TensorFlow's own `ResourceScatterNd...` turn every later read of the variable
into a copy. Positions are those of the flattened variable; what is beyond its
end is dropped.
"""

import tensorflow as tf

from tf_optimizers.kernels.compiled import assign, compiled, read


def set_entries(
    handle: tf.Tensor,
    like: tf.TensorSpec,
    positions: tf.Tensor,
    values: tf.Tensor,
) -> None:
    """Set distinct entries, inside an XLA kernel.

    Args:
        handle: Of the variable.
        like: Its shape and dtype.
        positions: int [n].
        values: [n], of its dtype.
    """
    flat = tf.reshape(read(handle, like), [-1])
    flat = tf.tensor_scatter_nd_update(flat, positions[:, tf.newaxis], values)
    assign(handle, tf.reshape(flat, like.shape))


def subtract_entries(
    variable: tf.Variable, entries: tf.IndexedSlices, rate: tf.Tensor
) -> None:
    """Subtract a multiple of entries, of which several may be at one place."""
    shape, dtype = variable.shape, variable.dtype
    like = tf.TensorSpec(shape, dtype)
    subtract = compiled(_subtract, shape, dtype, like)
    subtract(variable.handle, entries.indices, entries.values, rate)


def _subtract(
    like: tf.TensorSpec,
    handle: tf.Tensor,
    positions: tf.Tensor,
    values: tf.Tensor,
    rate: tf.Tensor,
) -> None:
    flat = tf.reshape(read(handle, like), [-1])
    flat = tf.tensor_scatter_nd_sub(
        flat, positions[:, tf.newaxis], rate * tf.cast(values, rate.dtype)
    )
    assign(handle, tf.reshape(flat, like.shape))
