"""Lists the functions of Keras and TensorFlow that the package replaces.

Other code in the process calls these functions, too. So a function is replaced
only when a feature that needs the replacement is first used. For code that does
not use the feature, the replacement behaves like the original, with one
exception: if several workers train together, every `Dataset.shuffle` without a
seed gets one, and so does Keras's shuffle of arrays, unless the user has seeded
TensorFlow. Replacements last until the process ends.
"""

import functools
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf


class Patch(NamedTuple):
    """Functions or properties that are replaced for one reason.

    Attributes:
        names: The full names of the functions or properties.
        features: The public features that need the replacement.
        why: The shortcoming of the original.
        without: The failure that users would see without the replacement.
        until: The upstream change that would make the replacement unnecessary.
        test: The test of the effect, as "file::name". The file is in `tests/`.
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
SWAPS = "`SwapEMAWeights` with `AdamOffload`"
WITHOUT_XLA = "`AdamOffload`, `DGCMomentum` or `SparseLoCo` on a GPU"

_LOSSES = "keras.src.losses.loss"
_ADAPTERS = "keras.src.trainers.data_adapters"
_OPTIMIZERS = "keras.optimizers"
_MULTI = (  # New in Keras 3.15.
    (f"{_OPTIMIZERS}.MultiOptimizer.apply",)
    if hasattr(keras.optimizers, "MultiOptimizer")
    else ()
)

PATCHES = (
    Patch(
        names=(f"{_OPTIMIZERS}.Optimizer.build",),
        features=(STRATEGY,),
        why="A Keras optimizer created outside of the scope must be moved into "
        "the strategy before it creates variables.",
        without="The optimizer fails, since strategies cannot be nested.",
        until="Keras moves optimizers, or has a hook before the first `build`.",
        test="workers/steps/test_named_steps.py::"
        "test_optimizer_of_keras_made_outside_trains_as_made_inside",
    ),
    Patch(
        names=("keras.Model._maybe_symbolic_build",),
        features=(STRATEGY,),
        why="Keras draws a batch before `fit`, and builds a model from the "
        "batch's mean over replicas.",
        without="A generator loses a batch. Data without a mean cause errors.",
        until="Keras builds models from the specification of the data.",
        test="workers/steps/test_built_models.py::"
        "test_first_batch_of_a_generator_trains_a_model_without_weights",
    ),
    Patch(
        names=("keras.Model._make_function",),
        features=(STRATEGY,),
        why="Keras passes a model's step to the strategy, without the model. "
        "A lambda or a decorated step does not refer to the model.",
        without="With N replicas, such a step trains with N times the "
        "gradient, and local steps wait for the network.",
        until="Keras also passes the model to the strategy.",
        test="workers/steps/test_named_steps.py::"
        "test_step_of_any_name_equals_one_process",
    ),
    Patch(
        names=(f"{_OPTIMIZERS}.LossScaleOptimizer._tf_apply",),
        features=(STRATEGY, REPLICAS),
        why="Keras tests whether gradients are finite before they are summed "
        "over replicas: on each replica, or only on the first.",
        without="Some replicas skip a step that other replicas take, or "
        "weights become NaN.",
        until="Keras tests the gradients of all replicas.",
        test="optimizers/test_replicas.py::test_replicas_skip_an_overflow_together",
    ),
    Patch(
        names=(
            "keras.Model._resolve_auto_jit_compile",
            "keras.Model.jit_compile",
        ),
        features=(WITHOUT_XLA,),
        why="On a GPU, Keras compiles steps with XLA if all layers support it, "
        "even if the optimizer does not.",
        without="On a GPU, `fit` fails after `compile(optimizer, loss)`.",
        until="Optimizers have `supports_jit`, as layers do.",
        test="optimizers/test_xla.py::test_auto_means_not_by_xla",
    ),
    Patch(
        names=("keras.callbacks.CallbackList.set_model",),
        features=(LOCAL_STEPS, STRATEGY, SWAPS),
        why="Optimizers and strategies cannot add callbacks. Replicas must "
        "average weights and statistics before other callbacks read them. "
        "`SwapEMAWeights` must be checked before the first step.",
        without="Validation uses each replica's own weights and statistics.",
        until="Optimizers or strategies may add callbacks.",
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
        why="Keras deletes the old file before it asks an optimizer for its "
        "state, and saves the statistics of one replica.",
        without="If saving fails, the old file is lost. Workers save different "
        "statistics.",
        until="Keras asks for the state before it opens the file.",
        test="optimizers/test_local_steps.py::test_local_weights_are_not_saved",
    ),
    Patch(
        names=("tensorflow.python.data.ops.shuffle_op._shuffle",),
        features=(STRATEGY,),
        why="Shuffles without a seed draw a random seed on each worker, and "
        "have no public count of epochs.",
        without="Workers draw different rows, which is an error.",
        until="`tf.data.Options` has a seed for shuffles without a seed.",
        test="workers/data/test_shared_data.py::"
        "test_tf_data_are_in_the_order_of_the_seed",
    ),
    Patch(
        names=(
            f"{_ADAPTERS}.array_data_adapter.ArrayDataAdapter.get_tf_dataset",
        ),
        features=(STRATEGY,),
        why="Keras shuffles arrays with a random seed on each worker. From "
        "3.16 on, the seed is the epoch's number, always 0 under a strategy.",
        without="Workers draw different rows, which is an error. From 3.16 on, "
        "each epoch has the same order.",
        until="`fit` has a seed for `shuffle=True`.",
        test="workers/data/test_shared_data.py::"
        "test_arrays_are_in_the_order_of_the_seed",
    ),
    Patch(
        names=(f"{_ADAPTERS}.generator_data_adapter.peek_and_restore",),
        features=(STRATEGY,),
        why="Several iterators draw from one Python generator, and TensorFlow "
        "reads ahead by as many batches as time allows.",
        without="From the second `fit` or validation on, workers draw "
        "different rows, which is an error.",
        until="Keras draws from generators without a thread.",
        test="workers/data/test_generators.py::"
        "test_fit_starts_at_the_batches_of_other_workers",
    ),
    Patch(
        names=(
            f"{_LOSSES}.scale_loss_for_distribution",
            f"{_LOSSES}.unscale_loss_for_distribution",
            f"{_LOSSES}.reduce_weighted_values",
        ),
        features=(STRATEGY,),
        why="Keras divides losses by the number of replicas, even if replicas "
        "have different numbers of rows.",
        without="If a batch cannot be split evenly, its rows have different "
        "weights.",
        until="A strategy may set the weight of a replica.",
        test="workers/steps/test_uneven_batches.py::"
        "test_uneven_batches_equal_one_process",
    ),
    Patch(
        names=(
            "tensorflow.nn.compute_average_loss",
            "tensorflow.nn.scale_regularization_loss",
        ),
        features=(STRATEGY,),
        why="Like Keras, these functions divide losses by the number of "
        "replicas.",
        without="With N replicas, a `train_step` that uses them trains on "
        "1 / N of its loss.",
        until="A strategy may set the weight of a replica.",
        test="workers/steps/test_custom_steps.py::test_custom_steps_equal_one_process",
    ),
    Patch(
        names=("keras.layers.BatchNormalization._moments",),
        features=(STRATEGY,),
        why="A replica without rows holds a padding row, and Keras does not "
        "synchronize statistics under a mask.",
        without="The padding row, or the mask, changes the statistics.",
        until="The layer accepts a weight for each row.",
        test="workers/steps/test_uneven_batches.py::"
        "test_replica_without_rows_keeps_its_statistics",
    ),
    Patch(
        names=(
            f"{_OPTIMIZERS}.Optimizer.apply",
            *_MULTI,
            f"{_OPTIMIZERS}.LossScaleOptimizer.apply",
            f"{_OPTIMIZERS}.LossScaleOptimizer.scale_loss",
        ),
        features=(STRATEGY,),
        why="Gradients of a custom step must be weighted by the replica's "
        "number of rows.",
        without="With N replicas, the gradients are N times too large.",
        until="A strategy may set the weight of a replica.",
        test="workers/steps/test_custom_steps.py::test_custom_steps_equal_one_process",
    ),
    Patch(
        names=("tensorflow.GradientTape.gradient",),
        features=(STRATEGY,),
        why="The gradient of a vector of losses is a sum over the replica's "
        "rows, but the gradients of a custom step are weighted like means.",
        without="With N replicas, a `train_step` that does not take the mean "
        "of its losses trains on 1 / N of the gradient.",
        until="A strategy may set the weight of a replica.",
        test="workers/steps/test_custom_steps.py::test_custom_steps_equal_one_process",
    ),
    Patch(
        names=(
            "keras.metrics.Mean.update_state",
            "keras.Variable.assign",
        ),
        features=(STRATEGY,),
        why="A custom step passes the mean over a replica's rows to a metric, "
        "without the number of rows. A replica without rows must not change "
        "any metric.",
        without="The mean is over replicas, not over rows.",
        until="A strategy may set the weight of a replica.",
        test="workers/steps/test_custom_steps.py::test_custom_steps_equal_one_process",
    ),
)


NAMES = {
    ".".join(name.split(".")[-2:]): name
    for patch in PATCHES
    for name in patch.names
}


def check_names(feature: str) -> None:
    """Raise if a feature has to replace a function that does not exist.

    Call this check before any function is replaced.
    """
    if missing := _missing(feature):
        raise RuntimeError(
            f"{feature} needs certain functions of Keras and TensorFlow. "
            f"Received: Keras {keras.__version__} and TensorFlow "
            f"{tf.__version__}, which lack {', '.join(missing)}. Install a "
            "newer tf_optimizers, or older versions of Keras and TensorFlow."
        )


def replace(key: str, make: Callable[[Any], Any]) -> None:
    """Replace a function or property that is listed in `PATCHES`.

    Callers use `functools.cache`, so that each replacement is made only once.
    If several callers replace the same name, the last replacement is called
    first.

    Args:
        key: The last two parts of the name, such as "CallbackList.set_model".
        make: Called with the original; returns the replacement.
    """
    owner, _, attribute = NAMES[key].rpartition(".")
    owner = pkgutil.resolve_name(owner)
    setattr(owner, attribute, make(getattr(owner, attribute)))


def hook(key: str, function: Callable) -> None:
    """Replace a function or method that is listed in `PATCHES`.

    Args:
        key: The last two parts of the name, such as "CallbackList.set_model".
        function: Called with the original, and with the arguments of the call;
            returns the result of the call.
    """

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return call

    replace(key, make)


def has_names(feature: str) -> bool:
    """Return whether all functions that a feature replaces exist."""
    return not _missing(feature)


def _missing(feature: str) -> list[str]:
    return [
        name
        for patch in PATCHES
        if feature in patch.features
        for name in patch.names
        if not _exists(name)
    ]


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True
