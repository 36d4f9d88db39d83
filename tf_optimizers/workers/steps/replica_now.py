"""What a replica does now, for functions that Keras calls in a step.

Those that replace Keras's get nothing but Keras's arguments. So what runs a
replica's function notes here what they must know. The replica is a thread, and
has its own.

    field          set by                       read by
    share          model_steps                  custom_steps, uneven_batches
    is_keras       model_steps                  custom_steps, uneven_batches
    is_training    model_steps                  custom_steps
    weights        model_steps                  custom_steps
    scaled         model_steps, custom_steps    custom_steps
    updated        model_steps, custom_steps    model_steps
    results        model_steps, metric_results  model_steps, metric_results
    note_metric    model_steps                  custom_steps
    is_applying    custom_steps                 custom_steps
    is_assigning   custom_steps                 strategy
    loop           share                        uneven_batches
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tf_optimizers.workers.steps.put_back import PutBack


class _Replica(threading.local):
    """What a replica does; nothing, where there is no step."""

    share: Any = None  # Its `Share` of the batch.
    is_keras: bool = False  # Whether it runs Keras's own `train_step`.
    is_training: bool = False  # Whether it runs any `train_step`.
    weights: PutBack | None = None  # What a step assigns to them by itself.
    scaled: set[int] = set()  # Ids of optimizers whose loss has been weighed.
    updated: dict[int, keras.Variable] = {}  # Those of metrics, by id.
    results: list[Any] | None = None  # Of metrics, see `metric_results.py`.
    note_metric: Callable | None = None  # Lets `results` have a metric's.
    is_applying: bool = False  # Within an optimizer.
    is_assigning: bool = False  # Within `keras.Variable.assign`.
    loop: Any = None  # The `Loop` that it runs, which is no step of a model.

    @contextlib.contextmanager
    def set(self, **values: Any) -> Iterator[None]:
        """Set attributes for a while."""
        before = {name: getattr(self, name) for name in values}
        self.__dict__.update(values)
        try:
            yield
        finally:
            self.__dict__.update(before)


replica = _Replica()
