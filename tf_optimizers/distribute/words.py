"""Tensors of any dtype as 32-bit words, which every collective takes."""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_BYTES = 4


def to_words(tensor: tf.Tensor) -> tf.Tensor:
    """Return the bits of a tensor as int32 [words], filled up with zeros."""
    flat = tf.reshape(tensor, [-1])
    if tensor.dtype.size < _BYTES:
        per_word = _BYTES // tensor.dtype.size
        flat = tf.pad(flat, [[0, -tf.size(flat) % per_word]])
        flat = tf.reshape(flat, [-1, per_word])
    return tf.reshape(tf.bitcast(flat, tf.int32), [-1])


class WordReader:
    """Reads tensors of several replicas back, in the order of `to_words`.

    Args:
        words: int32, of each replica equally many.
        replicas: Their number.
    """

    def __init__(self, words: tf.Tensor, replicas: int) -> None:
        self._words = tf.reshape(words, [replicas, -1])
        self.replicas = replicas
        self._next: Any = 0

    def read(self, dtype: tf.DType, shape: Sequence[Any]) -> tf.Tensor:
        """Return [replicas, *shape] of what each replica wrote next."""
        size = math.prod(shape)
        end = self._next + -(-size * dtype.size // _BYTES)
        words = self._words[:, self._next : end]
        self._next = end
        if dtype.size > _BYTES:
            per_element = dtype.size // _BYTES
            words = tf.reshape(words, [self.replicas, -1, per_element])
        flat = tf.reshape(tf.bitcast(words, dtype), [self.replicas, -1])
        return tf.reshape(flat[:, :size], [self.replicas, *shape])
