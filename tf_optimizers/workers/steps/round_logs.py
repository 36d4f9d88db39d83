"""Sums logs and metrics' variables over replicas, in rounds of local steps."""

import weakref
from typing import Any, cast

import keras
import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import (
    add_to_graphs,
    plain_variable,
)
from tf_optimizers.workers.collectives.later import GatherLater
from tf_optimizers.wrapped import LocalRound

_NEVER = tf.int32.max  # The age before the first sum of an epoch.


class _Kept:
    """The last sum, and the number of steps since then.

    Args:
        like: A tensor with the shape and dtype of the values.
        gather: A `GatherLater`, which exchanges values while the next steps
            run. By default, values are exchanged within a step.
    """

    def __init__(self, like: tf.Tensor, gather: Any = None) -> None:
        self.gather = gather
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = tf.zeros(like.shape, like.dtype)
            self.last = plain_variable(zeros)
            self.age = plain_variable(_NEVER)

    def keep(self, result: tf.Tensor) -> tf.Tensor:
        """Store a new sum, and return it."""
        self.last.assign(result)
        self.age.assign(0)
        return tf.identity(result)

    def repeat(self) -> tf.Tensor:
        """Return the last sum, in a step without a new one."""
        self.age.assign_add(1)
        return self.last.read_value()


# The `_Kept` objects of each model's steps. A traced function does not keep its
# variables alive, so the graph of each step has a reference to its `_Kept`.
_kept: weakref.WeakKeyDictionary[keras.Model, weakref.WeakSet[_Kept]] = (
    weakref.WeakKeyDictionary()
)


def reduce_in_next_step(model: keras.Model) -> None:
    """Prevent a model's steps from returning the previous epoch's logs."""
    for kept in _kept.get(model, ()):
        kept.age.assign(_NEVER)


def sum_in_rounds(
    strategy: Any, model: keras.Model, current: LocalRound, value: Any
) -> tf.Tensor:
    """Sum a vector over replicas in some steps; repeat the sum in others.

    In a round of several local steps (`SparseLoCo`), replicas exchange values
    only in the last step. So values are summed in the last step of a round, in
    the first step of an epoch, and when as many batches as in a round have
    passed without a sum. Other steps return the last sum, which is the same on
    all workers. So a callback that reads logs and stops training does so on all
    workers. If rounds overlap, the last step of a round only starts to sum
    floating-point values, and returns the previous sum.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
        model: The model of the step.
        current: The round of the step.
        value: The replicas' vectors, as a per-replica value.
    """
    own = strategy.experimental_local_results(value)
    first, gather = own[0], cast(Any, None)
    if current.overlaps and first.dtype.is_floating:
        shape = [first.shape.num_elements() + 1]
        gather = GatherLater(strategy.extended, "logs", shape, first.dtype)
    kept = _Kept(first, gather)
    add_to_graphs("reduced_logs", kept)
    _kept.setdefault(model, weakref.WeakSet()).add(kept)

    def sum_now() -> tf.Tensor:
        # Wait for an older exchange, and discard its values.
        taken = [gather.take()] if gather else []
        with tf.control_dependencies(taken):
            total = strategy.extended.reduce_in_parallel("SUM", value)
        return kept.keep(strategy.experimental_local_results(total)[0])

    def sum_later() -> tf.Tensor:
        # Each replica sends a 1 after its values. If no values have arrived,
        # `take` returns zeros, and the total of the ones is 0.
        total = tf.reduce_sum(gather.take(), 0)
        came = tf.reshape(total[:-1], first.shape)
        result = tf.where(total[-1] > 0, came, kept.last.read_value())
        with tf.control_dependencies([total]):
            gather.start(
                [tf.concat([tf.reshape(v, [-1]), one], 0) for v in own]
            )
        return kept.keep(result)

    # If steps do not use the optimizer, a round never ends. So also sum values
    # if the last sum is as many steps old as a round has batches.
    is_old = kept.age.read_value() >= current.batches
    if gather is None:
        return tf.cond(current.ends | is_old, sum_now, kept.repeat)
    one = tf.ones([1], first.dtype)
    return tf.cond(
        is_old,
        sum_now,
        lambda: tf.cond(current.ends, sum_later, kept.repeat),
    )
