"""Finds the steps of `fit` that exchange values, for models with local steps.

`SparseLoCo(sync_every=H)` takes rounds of H steps, and exchanges entries in the
last step of each round. `fit` exchanges logs and notes on batches in the same
step, so that few other steps wait for the network:

    step       1   2   3  ...   H   1   2  ...
    entries                     x
    notes                       x
    logs       x*               x               * in the first step of an epoch
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tf_optimizers.wrapped import (
    LocalRound,
    current_round,
    only_local_steppers,
)


class _Training(threading.local):
    """Describes the training that `fit` runs in the current thread."""

    optimizers: Sequence[Any] = ()  # The optimizers that take local steps.


_training = _Training()


def with_rounds(model: keras.Model, function: Callable) -> Callable:
    """Wrap a train function, so that `round_of_fit` finds the optimizers.

    Return `function` itself if the model has no optimizer, or an optimizer that
    takes no local steps.
    """
    optimizers = only_local_steppers(model)
    if not optimizers:
        return function

    @functools.wraps(function)
    def train(iterator: Any) -> Any:
        before, _training.optimizers = _training.optimizers, optimizers
        try:
            return function(iterator)
        finally:
            _training.optimizers = before

    return train


def round_of_fit() -> LocalRound | None:
    """Return the round of local steps that the next step of `fit` belongs to.

    Call this function outside of `strategy.run`.

    Returns:
        None outside of Keras's train function, if every step may exchange
        values, or if an optimizer is not built.
    """
    return current_round(_training.optimizers)
