"""The state of the replica that is running, for functions that Keras calls.

A function that replaces a function of Keras gets only Keras's arguments. The
code that runs a replica passes all other values through this state. Each local
replica runs in a separate thread, and has separate values.

    field         set by                       read by
    share         model_steps                  step_hooks, uneven_batches, share
    model         model_steps                  step_hooks
    rows          model_steps                  step_hooks, share
    is_training   model_steps                  step_hooks
    weights       model_steps                  step_hooks
    scaled        model_steps, step_hooks      step_hooks, uneven_batches
    waits         model_steps                  noted_exchanges
    updated       model_steps, step_hooks      model_steps
    vectors       model_steps, share           model_steps
    results       model_steps, metric_results  model_steps, metric_results
    is_adding_up  metric_results               uneven_batches
    note_metric   model_steps                  step_hooks
    is_applying   step_hooks                   step_hooks, noted_exchanges
    is_assigning  step_hooks                   strategy
    loop          share                        uneven_batches
"""

from collections.abc import Callable
from typing import Any

import keras

from tf_optimizers.workers.collectives.thread_state import ThreadState
from tf_optimizers.workers.steps.restored_weights import RestoredWeights


class _Replica(ThreadState):
    """The state of a replica. The defaults mean that no step is running."""

    share: Any = None  # The replica's `Share` of the batch.
    model: keras.Model | None = None  # The model that trains or is evaluated.
    rows: Any = None  # The replica's number of rows; an int if it is static.
    is_training: bool = False  # Whether the step is a `train_step`.
    weights: RestoredWeights | None = None  # The values assigned to weights.
    scaled: set[int] = set()  # Ids of optimizers that have weighted their loss.
    waits: Any = None  # The variable from `waits_of_fit`.
    # The variables of metrics to which the step has assigned values, by id.
    updated: dict[int, keras.Variable] = {}
    vectors: list[Any] = []  # See `share.factor_of_sum`.
    results: list[Any] | None = None  # See `metric_results.noted_methods`.
    # Whether a metric that may add losses to its variables is being updated.
    is_adding_up: bool = False
    # Makes a metric add its results to `results`.
    note_metric: Callable | None = None
    is_applying: bool = False  # Whether an optimizer's `apply` is running.
    # Whether an `on_read` variable is being assigned outside of a model's step.
    is_assigning: bool = False
    loop: Any = None  # The `Loop` of a function that is not a model's step.


replica = _Replica()
