"""Values of any dtype, as ones that an all-gather takes.

    bool, small integers, bfloat16     as wider numbers
    other numbers                      bit by bit
    strings                            as int32 words, filled up, and lengths

TensorFlow's gather takes float16, float32, float64, int32 and int64.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_TAKEN = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_BITS = {
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
    tf.complex128: tf.float64,
}
_BYTES = 4  # Of a word.


def gather_any(
    strategy: Any, gather: Callable, value: Any, axis: int
) -> tf.Tensor:
    """Return the values of all replicas, one after another.

    Args:
        strategy: The strategy, outside of its replicas.
        gather: TensorFlow's, of a value and an axis.
        value: One for each replica.
        axis: Along which they are joined.
    """
    local = strategy.experimental_local_results(value)[0]
    tensor = tf.convert_to_tensor(local)
    dtype, axis = tensor.dtype, axis % (len(tensor.shape) or 1)

    def mapped(function: Callable, *args: Any) -> Any:
        # The strategy's own `run` would take note of what it returns.
        return tf.distribute.Strategy.run(strategy, function, args)

    if dtype in _TAKEN:
        return gather(value, axis)
    if dtype in _BITS:
        bits = mapped(lambda x: tf.bitcast(x, _BITS[dtype]), value)
        return tf.bitcast(gather(bits, axis), dtype)
    if dtype != tf.string:
        wide = tf.float32 if dtype.is_floating else tf.int32
        return tf.cast(
            gather(mapped(lambda x: tf.cast(x, wide), value), axis), dtype
        )
    lengths = mapped(tf.strings.length, value)
    longest = gather(mapped(_longest, lengths), 0)
    size = tf.reduce_max(longest)
    words = mapped(lambda x: _words(x, size), value)
    return _strings(gather(words, axis), gather(lengths, axis))


def _longest(lengths: tf.Tensor) -> tf.Tensor:
    """Return the bytes of the longest string, in whole words; one at least."""
    most = tf.reduce_max(tf.concat([[1], tf.reshape(lengths, [-1])], 0))
    return tf.reshape(-(-most // _BYTES) * _BYTES, [1])


def _words(strings: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_raw(strings, tf.int32, fixed_length=size)


def _strings(words: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Return the first bytes of words as strings."""
    table = tf.constant([bytes([code]) for code in range(256)])
    codes = tf.cast(tf.bitcast(words, tf.uint8), tf.int32)
    joined = tf.strings.reduce_join(tf.gather(table, codes), axis=[-1, -2])
    return tf.strings.substr(joined, tf.zeros_like(lengths), lengths)
