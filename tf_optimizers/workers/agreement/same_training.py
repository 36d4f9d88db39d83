"""Checks that workers have the same optimizers, weights and learning rates."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.keras_internals import (
    has_hooks,
    micro_steps,
    path_of,
)
from tf_optimizers.codes.digests import digests
from tf_optimizers.replicas import local_copies
from tf_optimizers.workers.agreement.statements import (
    START_THE_SAME,
    check_equal,
    gather_statements,
)
from tf_optimizers.wrapped import (
    every_optimizer,
    has_common_weights,
    has_local_steps,
    is_within_round,
    is_wrapper,
    with_updated_variables,
    wrapped_optimizers,
)

_CALLBACKS = "Callbacks and your own code must set the same {} on every worker."
_COPIES = (
    " Before they copy weights from a model that takes local steps, call "
    "`optimizer.synchronize()` on every worker."
)
_ROUND = (
    "After local steps, call `synchronize` of the optimizer that took them, on "
    "every worker, before another optimizer takes a step. "
)
_STEPS = (
    "A step, or a layer, assigns to {paths} without an optimizer, and each "
    "replica computes the value from its own rows or, with local steps, its "
    "own weights. Apply the change with an optimizer; make the variable "
    "`trainable=False`; or assign a value that is the same on all replicas, "
    "such as "
    "`tf.distribute.get_replica_context().all_reduce('SUM', value)`. If the "
    "step changes weights only temporarily, copy them first "
    "(`tf.identity(weight)`), and assign the copies at the end of the step."
)


def check_same_optimizer(
    strategy: Any, optimizer: Any, variables: Sequence[Any]
) -> None:
    """Raise unless all workers have the same optimizer and variables.

    Workers that differ would wait for each other forever in the first step, or
    train different weights. For example, one worker may find no checkpoint, and
    start with new weights.
    """
    optimizers = wrapped_optimizers(optimizer)
    with tf.init_scope():
        settings = _settings(optimizer)
        hint = (_ROUND if is_within_round() else "") + START_THE_SAME
        # After a restore, only the inner optimizer of `ShardedState` has the
        # right step count.
        step = max(int(micro_steps(each)) for each in optimizers)
        weights = {}
        # In a round of local steps, weights differ intentionally.
        if all(getattr(each, "is_synchronized", True) for each in optimizers):
            weights = {
                f"weight {i}": digests_of(strategy, variable)
                for i, variable in enumerate(variables)
            }
    shapes = {
        f"variable {i}": f"{variable.dtype} {tuple(variable.shape)}"
        for i, variable in enumerate(variables)
    }
    subject = "the optimizer's first step"
    statement = {"optimizer": type(optimizer).__name__, "step": step}
    statement |= settings | shapes | weights
    paths = map(path_of, variables)
    shown = {f"weight {i}": path for i, path in enumerate(paths)}
    check_equal(
        subject,
        gather_statements(strategy, subject, statement),
        hint,
        shown=shown,
    )


def digests_of(strategy: Any, variable: Any) -> list[str]:
    """Return the distinct digests of a variable's values on this worker.

    The list is empty for a variable that the first step creates, since the
    variable has no values yet.
    """
    return digests(
        copy.numpy()
        for copy in local_copies(strategy, variable)
        if copy.is_initialized()
    )


def _settings(optimizer: Any) -> dict[str, Any]:
    if not has_hooks(optimizer):
        return {}  # In other packages, `get_config` may fail or warn.
    try:
        return _without_names(optimizer.get_config())
    except NotImplementedError:  # A user's schedule may have no config.
        return {}


def _without_names(settings: Any) -> Any:
    """Return a nest of settings without the entries called "name".

    Keras numbers the names of optimizers in the order of creation, which may
    differ between workers.
    """
    if isinstance(settings, (list, tuple)):
        return [_without_names(each) for each in settings]
    if not isinstance(settings, dict):
        return settings
    return {
        key: _without_names(value)
        for key, value in settings.items()
        if key != "name"
    }


def check_same_training(
    statements: Sequence[dict[str, Any]],
    weights: Sequence[Any],
    assigned: Sequence[Any],
) -> None:
    """Raise unless workers have equal weights, learning rates and step counts.

    A callback may set a weight or the learning rate on one worker only. A step
    may compute a value from its replica's rows, and assign it to a weight
    without an optimizer. Then workers would differ permanently, and no step
    would detect the difference.

    Args:
        statements: The results of `statement_of` on all workers.
        weights: The compared weights.
        assigned: The weights that steps assign without an optimizer.
    """
    hint = (
        hint_of_steps(assigned)
        if assigned
        else hint_of_code("weights and learning rates")
    )
    check_equal(
        "the weights and the learning rate",
        statements,
        hint,
        # Show paths, but do not compare them: a path depends on the number of
        # models that a worker has created.
        shown={f"weight {i}": weight.path for i, weight in enumerate(weights)},
    )


def hint_of_steps(assigned: Sequence[Any]) -> str:
    """Return an error's advice about weights that steps assign."""
    paths = ", ".join(f"`{path_of(weight)}`" for weight in assigned)
    return _STEPS.format(paths=paths)


def hint_of_code(values: str) -> str:
    """Return an error's advice about values that callbacks or scripts set."""
    return _CALLBACKS.format(values) + (_COPIES if has_local_steps() else "")


def compared_weights(model: keras.Model) -> list[Any]:
    """Return the weights that must have the same values on all workers.

    Within a round of local steps, the list is empty, since the weights of
    replicas intentionally differ.
    """
    if not has_common_weights(model):
        return []
    return with_updated_variables(model, model.trainable_variables)


def statement_of(
    strategy: Any, model: keras.Model, weights: Sequence[Any]
) -> dict[str, Any]:
    """Return a model's learning rates, step counts and digests of weights."""
    return _rates_of(model) | {
        f"weight {i}": digests_of(strategy, weight)
        for i, weight in enumerate(weights)
    }


def _rates_of(model: keras.Model) -> dict[str, str | int]:
    """Return learning rates and step counts of optimizers, except wrappers."""
    found: dict[str, str | int] = {}
    inner = [each for each in every_optimizer(model) if not is_wrapper(each)]
    for i, each in enumerate(inner):
        end = f" of optimizer {i}" if len(inner) > 1 else ""
        rate = tf.convert_to_tensor(each.learning_rate).numpy()
        found[f"learning_rate{end}"] = str(rate)
        found[f"step{end}"] = int(micro_steps(each))
    return found
