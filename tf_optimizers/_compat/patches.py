"""Lists all that is replaced in Keras and TensorFlow.

Others in the process use these classes and functions, too. So nothing is
replaced before a feature is first used, and what takes a name's place does what
the original does for all who do not use the feature. It stays for the rest of
the process.
"""

import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf


class Patch(NamedTuple):
    """Some names that are replaced, and why.

    Attributes:
        names: Where they are.
        features: What needs it, as a user knows it.
        why: What the original does not do.
        without: What would be wrong if the replacement were not called.
        until: What upstream would have to offer for it to go.
        test: Sees the effect: its file in tests/, and its name.
    """

    names: tuple[str, ...]
    features: tuple[str, ...]
    why: str
    without: str
    until: str
    test: str


STRATEGY = "`SparseMultiWorkerMirroredStrategy`"
REPLICAS = "An optimizer of `tf_optimizers` with several replicas"
LOCAL_STEPS = "`SparseLoCo`"
WITHOUT_XLA = "`AdamOffload`, `DGCMomentum` or `SparseLoCo` on a GPU"

_LOSSES = "keras.src.losses.loss"
_ADAPTERS = "keras.src.trainers.data_adapters"
_OPTIMIZERS = "keras.optimizers"
_MULTI = (  # Of Keras 3.12.
    (f"{_OPTIMIZERS}.MultiOptimizer.apply",)
    if hasattr(keras.optimizers, "MultiOptimizer")
    else ()
)

PATCHES = (
    Patch(
        names=(f"{_OPTIMIZERS}.Optimizer.build",),
        features=(STRATEGY,),
        why="An optimizer of Keras that was made outside of the scope must "
        "become the strategy's before it makes variables.",
        without="Such an optimizer fails: strategies must not be nested.",
        until="Keras does so itself, or calls something before the first "
        "`build`.",
        test="workers/test_guide.py::test_compile_outside_of_the_scope_is_as_inside",
    ),
    Patch(
        names=("keras.Model._maybe_symbolic_build",),
        features=(STRATEGY,),
        why="Keras draws a batch before `fit`, and builds a model by its mean "
        "over replicas.",
        without="A generator loses a batch, and data that have no mean fail.",
        until="Keras builds by the specification of the data.",
        test="workers/test_guide.py::test_data_may_be_of_any_dtype",
    ),
    Patch(
        names=("keras.Model._make_function",),
        features=(STRATEGY,),
        why="Keras passes a strategy the step of a model, which does not tell "
        "the model if it is a lambda, or what a decorator returns.",
        without="Such a step trains with N times the gradient.",
        until="A strategy is told which model it runs a step of.",
        test="workers/steps/test_named_steps.py::"
        "test_step_of_any_name_equals_one_process",
    ),
    Patch(
        names=(f"{_OPTIMIZERS}.LossScaleOptimizer.apply",),
        features=(STRATEGY, REPLICAS),
        why="Keras asks one replica whether gradients are finite, before they "
        "are summed.",
        without="Some replicas skip a step that others make.",
        until="Keras asks all replicas.",
        test="optimizers/test_replicas.py::test_replicas_skip_an_overflow_together",
    ),
    Patch(
        names=(
            "keras.Model._resolve_auto_jit_compile",
            "keras.Model.jit_compile",
        ),
        features=(WITHOUT_XLA,),
        why="On a GPU, Keras compiles steps by XLA if all layers support that. "
        "It does not ask optimizers.",
        without="`fit` after `compile(optimizer, loss)` raises, on a GPU.",
        until="Optimizers have `supports_jit`, as layers have.",
        test="optimizers/test_xla.py::test_auto_means_not_by_xla",
    ),
    Patch(
        names=("keras.callbacks.CallbackList.set_model",),
        features=(LOCAL_STEPS, STRATEGY),
        why="Optimizers and strategies cannot add callbacks, and weights and "
        "statistics are to be alike before others read them.",
        without="A validation sees each replica's own.",
        until="Optimizers, or strategies, may add callbacks.",
        test="optimizers/test_local_steps.py::"
        "test_fit_reads_common_weights_everywhere",
    ),
    Patch(
        names=(
            "keras.Model.save",
            "keras.Model.save_weights",
            "keras.Model.export",
        ),
        features=(LOCAL_STEPS, STRATEGY),
        why="Keras asks an optimizer for its state when the file has been "
        "opened, and its old content is gone; statistics it reads on one "
        "replica.",
        without="A model that cannot be saved yet destroys what was saved, and "
        "each worker saves statistics of its own.",
        until="Keras asks before it opens the file.",
        test="optimizers/test_local_steps.py::test_own_weights_are_not_saved",
    ),
    Patch(
        names=("tensorflow.python.data.ops.shuffle_op._shuffle",),
        features=(STRATEGY,),
        why="Shuffles without a seed draw one on each worker, and tell nobody "
        "how often they have been drawn from.",
        without="Workers draw different rows, which is an error.",
        until="`tf.data.Options` has a seed for shuffles without one.",
        test="workers/data/test_shared_data.py::"
        "test_tf_data_are_in_the_order_of_the_seed",
    ),
    Patch(
        names=(
            f"{_ADAPTERS}.array_data_adapter.ArrayDataAdapter.get_tf_dataset",
        ),
        features=(STRATEGY,),
        why="Keras shuffles arrays by a seed of each worker, from 3.16 on by "
        "the number of the epoch, which it takes to be 0 for ever.",
        without="Workers draw different rows, which is an error; from 3.16 on, "
        "each epoch has the same order.",
        until="`fit` has a seed for `shuffle=True`.",
        test="workers/data/test_shared_data.py::"
        "test_arrays_are_in_the_order_of_the_seed",
    ),
    Patch(
        names=(f"{_ADAPTERS}.generator_data_adapter.peek_and_restore",),
        features=(STRATEGY,),
        why="Several iterators draw from one Python generator, and TensorFlow "
        "reads ahead as far as there is time.",
        without="From the second `fit` or validation on, workers draw "
        "different rows, which is an error.",
        until="Keras draws from generators without a thread.",
        test="workers/test_guide.py::"
        "test_generator_goes_on_alike_on_all_workers",
    ),
    Patch(
        names=(
            f"{_LOSSES}.scale_loss_for_distribution",
            f"{_LOSSES}.unscale_loss_for_distribution",
            f"{_LOSSES}.reduce_weighted_values",
        ),
        features=(STRATEGY,),
        why="Keras divides losses by the number of replicas, whatever part of "
        "the rows each has.",
        without="Rows of a batch that cannot be shared evenly count "
        "differently.",
        until="A strategy may say what a replica counts for.",
        test="workers/steps/test_uneven_batches.py::"
        "test_uneven_batches_equal_one_process",
    ),
    Patch(
        names=(
            "tensorflow.nn.compute_average_loss",
            "tensorflow.nn.scale_regularization_loss",
        ),
        features=(STRATEGY,),
        why="TensorFlow's two functions divide losses likewise.",
        without="A `train_step` that uses them trains on 1 / N of its loss.",
        until="A strategy may say what a replica counts for.",
        test="workers/steps/test_custom_steps.py::test_own_steps_equal_one_process",
    ),
    Patch(
        names=("keras.layers.BatchNormalization._moments",),
        features=(STRATEGY,),
        why="A replica without rows has one that counts for nothing.",
        without="That row moves the statistics.",
        until="The layer takes weights of rows.",
        test="workers/steps/test_uneven_batches.py::"
        "test_replica_without_rows_keeps_its_statistics",
    ),
    Patch(
        names=(
            # And, again, that of `LossScaleOptimizer`, which has a row above.
            f"{_OPTIMIZERS}.Optimizer.apply",
            *_MULTI,
            f"{_OPTIMIZERS}.Optimizer.scale_loss",
            f"{_OPTIMIZERS}.LossScaleOptimizer.scale_loss",
        ),
        features=(STRATEGY,),
        why="Gradients of a step that users write count by the replica's rows.",
        without="They are N times too large.",
        until="A strategy may say what a replica counts for.",
        test="workers/steps/test_custom_steps.py::test_own_steps_equal_one_process",
    ),
    Patch(
        names=(
            "keras.metrics.Mean.update_state",
            "keras.Variable.assign",
        ),
        features=(STRATEGY,),
        why="A number that a step gives to a metric is that of the replica's "
        "rows; a replica without rows changes no metric.",
        without="The mean is of replicas, not of rows.",
        until="A strategy may say what a replica counts for.",
        test="workers/steps/test_custom_steps.py::test_own_steps_equal_one_process",
    ),
)


NAMES = {
    ".".join(name.split(".")[-2:]): name
    for patch in PATCHES
    for name in patch.names
}


def check_names(feature: str) -> None:
    """Raise if a name is gone that a feature needs replaced.

    Called before anything is replaced.

    Raises:
        RuntimeError: If so.
    """
    if gone := _gone(feature):
        raise RuntimeError(
            f"{feature} needs names of Keras and TensorFlow that the installed "
            f"versions must have. Received: Keras {keras.__version__} and "
            f"TensorFlow {tf.__version__}, without {', '.join(gone)}. Install "
            "a newer tf_optimizers, or the last versions that have them."
        )


def replace(key: str, make: Callable[[Any], Any]) -> None:
    """Put something in the place of a name of the table.

    Who calls this does so once: `functools.cache`. What has been replaced may
    be replaced again; the last comes first.

    Args:
        key: The last two parts of the name, such as "CallbackList.set_model".
        make: Called with the original; returns what takes its place.
    """
    owner, _, attribute = NAMES[key].rpartition(".")
    owner = pkgutil.resolve_name(owner)
    setattr(owner, attribute, make(getattr(owner, attribute)))


def has_names(feature: str) -> bool:
    """Return whether all names are there that a feature needs replaced."""
    return not _gone(feature)


def _gone(feature: str) -> list[str]:
    return [
        name
        for patch in PATCHES
        if feature in patch.features
        for name in patch.names
        if not _is_there(name)
    ]


def _is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True
