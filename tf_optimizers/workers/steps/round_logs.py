"""Reduces logs and metrics' variables over replicas, during a step."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, cast

import keras
import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import (
    add_to_graphs,
    plain_variable,
)
from tf_optimizers.workers.collectives.later import GatherLater
from tf_optimizers.wrapped import LocalRound

_NEVER = tf.int32.max  # The age before the first reduction of an epoch.


class _Kept:
    """The result of the last reduction, and the number of steps since then.

    Args:
        like: A tensor with the shape and dtype of the values.
        gather: A `GatherLater`, which exchanges values while the next steps
            run. If None, values are exchanged within a step. Defaults to
            `None`.
    """

    def __init__(self, like: tf.Tensor, gather: Any = None) -> None:
        self.gather = gather
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = tf.zeros(like.shape, like.dtype)
            self.last = plain_variable(zeros)
            self.age = plain_variable(_NEVER)

    def keep(self, result: tf.Tensor) -> tf.Tensor:
        """Store the result of a reduction in this step, and return it."""
        self.last.assign(result)
        self.age.assign(0)
        return tf.identity(result)

    def repeat(self) -> tf.Tensor:
        """Return the stored result, in a step without a reduction."""
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


class Reduction:
    """Reduces values over replicas, in parallel with a step.

    Normally, every step reduces values. But in a round of several local steps
    (`SparseLoCo`), replicas exchange values only in the last step. Then values
    are reduced in the last step of a round, in the first step of an epoch, and
    when as many batches as in a round have passed without a reduction. Other
    steps return the result of the last reduction, which is the same on all
    workers. So a callback that reads logs and stops training does so on all
    workers. If rounds overlap, the last step of a round only starts the
    reduction of floating-point values, and returns the result of the previous
    reduction.

    Args:
        strategy: A `SparseMultiWorkerMirroredStrategy`.
        model: The model of the step; needed only with `current`. Defaults to
            `None`.
        current: The round of the step; None if every step reduces values.
            Defaults to `None`.
    """

    def __init__(
        self,
        strategy: Any,
        model: keras.Model | None = None,
        current: LocalRound | None = None,
    ) -> None:
        self._strategy, self._model, self._round = strategy, model, current

    def by(self, reduce_op: Any) -> Callable[[Any], Any]:
        """Return a function that reduces replicas' vectors by `reduce_op`."""
        reduce = functools.partial(
            self._strategy.extended.reduce_in_parallel, reduce_op
        )
        if self._round is None:
            return reduce
        is_mean = tf.distribute.ReduceOp(reduce_op).name == "MEAN"
        count = self._strategy.num_replicas_in_sync if is_mean else 1
        return functools.partial(
            self._reduce_in_rounds, reduce, self._round, count
        )

    def _reduce_in_rounds(
        self, reduce: Callable, current: LocalRound, count: int, value: Any
    ) -> tf.Tensor:
        own = self._strategy.experimental_local_results(value)
        first, gather = own[0], cast(Any, None)
        if current.overlaps and first.dtype.is_floating:
            shape = [first.shape.num_elements() + 1]
            extended = self._strategy.extended
            gather = GatherLater(extended, "logs", shape, first.dtype)
        kept = _Kept(first, gather)
        add_to_graphs("reduced_logs", kept)
        _kept.setdefault(self._model, weakref.WeakSet()).add(kept)

        def reduce_now() -> tf.Tensor:
            # Wait for an older exchange, and discard its values.
            taken = [gather.take()] if gather else []
            with tf.control_dependencies(taken):
                reduced = reduce(value)
            return kept.keep(
                self._strategy.experimental_local_results(reduced)[0]
            )

        def reduce_later() -> tf.Tensor:
            # Each replica sends a 1 after its values. If no values have
            # arrived, `take` returns zeros, and the total of the ones is 0.
            total = tf.reduce_sum(gather.take(), 0)
            came = tf.reshape(total[:-1] / count, first.shape)
            result = tf.where(total[-1] > 0, came, kept.last.read_value())
            with tf.control_dependencies([total]):
                gather.start(
                    [tf.concat([tf.reshape(v, [-1]), one], 0) for v in own]
                )
            return kept.keep(result)

        # If steps do not use the optimizer, a round never ends. So values are
        # also reduced when their age reaches the number of batches in a round.
        is_old = kept.age.read_value() >= current.batches
        if gather is None:
            return tf.cond(current.ends | is_old, reduce_now, kept.repeat)
        one = tf.ones([1], first.dtype)
        return tf.cond(
            is_old,
            reduce_now,
            lambda: tf.cond(current.ends, reduce_later, kept.repeat),
        )
