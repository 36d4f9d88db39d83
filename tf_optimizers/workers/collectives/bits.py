"""Encodes values in dtypes that TensorFlow's collectives support.

    bool, 8-bit numbers    as float16, which represents all of their values
    other numbers          unchanged, or bitcast
    strings                as padded int32 words, and their lengths

A gather supports float16, float32, float64, int32 and int64 (TensorFlow 2.21).
A broadcast also supports bool. Encoded tensors have the shapes of the values,
so that users recognize the tensors in an error. Only complex128 and strings get
one more dimension.
"""

import tensorflow as tf

GATHERED_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_SAME_SIZE = {2: tf.float16, 4: tf.int32, 8: tf.int64, 16: tf.float64}
_WORD_BYTES = 4


def to_numbers(tensor: tf.Tensor) -> tf.Tensor:
    """Encode numbers or bools in one of the dtypes in `GATHERED_DTYPES`."""
    dtype = tensor.dtype
    if dtype in GATHERED_DTYPES:
        return tensor
    if dtype.size == 1:
        return tf.cast(tensor, tf.float16)
    return tf.bitcast(tensor, _SAME_SIZE[dtype.size])


def from_numbers(numbers: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Decode a tensor that `to_numbers` has encoded from `dtype`."""
    if dtype in GATHERED_DTYPES:
        return numbers
    if dtype.size == 1:
        return tf.cast(numbers, dtype)
    return tf.bitcast(numbers, dtype)


def longest_in(lengths: tf.Tensor) -> tf.Tensor:
    """Return the largest length of strings, rounded up to whole words.

    All lengths are in bytes. The result is at least one word.
    """
    most = tf.reduce_max(tf.concat([[1], tf.reshape(lengths, [-1])], 0))
    return -(-most // _WORD_BYTES) * _WORD_BYTES


def strings_to_words(strings: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Encode each string as int32 words, padded to `size` bytes."""
    return tf.io.decode_raw(strings, tf.int32, fixed_length=size)


def words_to_strings(words: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Return the strings that `strings_to_words` has encoded as `words`.

    `lengths` are the lengths of the strings in bytes, without padding.
    """
    table = tf.constant([bytes([code]) for code in range(256)])
    codes = tf.cast(tf.bitcast(words, tf.uint8), tf.int32)
    joined = tf.strings.reduce_join(tf.gather(table, codes), axis=[-1, -2])
    return tf.strings.substr(joined, tf.zeros_like(lengths), lengths)
