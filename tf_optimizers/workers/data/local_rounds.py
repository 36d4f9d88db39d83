"""Finds the steps of `fit` that exchange values, for models with local steps.

`SparseLoCo(sync_every=H)` takes rounds of H steps, and exchanges entries in the
last step of each round. `fit` exchanges logs and notes on batches in the same
step, so that few other steps wait for the network:

    step       1   2   3  ...   H   1   2  ...
    entries                     x
    notes      x*               x               *  in an iterator's first step
    logs       x**              x               ** in an epoch's first step

But a loss or a layer may exchange values in every step, for example the sum of
a mask. Such a step would wait forever for a worker whose data have ended, so in
this case, every step also exchanges notes and logs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import plain_variable
from tf_optimizers.workers.collectives.thread_state import ThreadState
from tf_optimizers.wrapped import (
    LocalRound,
    current_round,
    only_local_steppers,
)


class _Training(ThreadState):
    """Describes the train function that runs in the current thread."""

    optimizers: Sequence[Any] = ()  # The optimizers that take local steps.
    waits: Any = None  # The variable from `with_rounds`.


_training = _Training()


def with_rounds(model: keras.Model, function: Callable) -> Callable:
    """Wrap a train function, so that `round_of_fit` finds the optimizers.

    Also create the variable that `waits_of_fit` returns: whether steps exchange
    values in the middle of a round.

    Return `function` itself if the model has no optimizer, or if one of its
    optimizers may exchange values in every step.
    """
    optimizers = only_local_steppers(model)
    if not optimizers:
        return function
    with tf.init_scope(), tf.device("CPU:0"):
        waits = plain_variable(False)

    @functools.wraps(function)
    def train(iterator: Any) -> Any:
        with _training.set(optimizers=optimizers, waits=waits):
            return function(iterator)

    return train


def waits_of_fit() -> tf.Variable | None:
    """Return the variable of this thread's train function, or None."""
    return _training.waits


def round_of_fit() -> LocalRound | None:
    """Return the round of local steps that the next step of `fit` belongs to.

    Call this function outside of `strategy.run`.

    Returns:
        None outside of Keras's train function, or if an optimizer may exchange
        values in every step, or is not built.
    """
    current = current_round(_training.optimizers)
    if current is None:
        return None
    waits = _training.waits.read_value()
    return current._replace(ends=current.ends | waits, waits=waits)
