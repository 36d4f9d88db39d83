"""Weights the gradients and metrics of a model's step by the replica's rows.

A step computes its loss from the replica's rows as one process would. Before an
optimizer sums gradients over replicas, each replica multiplies its loss or its
gradients by its share: its rows / the rows of all replicas. If a step updates a
`Mean` with a number, the number's weight is also multiplied by the share,
unless the weight is already a number of rows. A replica without rows may reset
metrics, but does not change them otherwise.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers._compat.keras_internals import (
    built_variables,
    has_hooks,
    is_overwritten,
    strategy_of,
)
from tf_optimizers._compat.strategies import (
    Attribute,
    adopt,
    call_for_all,
    check_in_run,
    is_adopted,
    made_outside,
    maker_of,
)
from tf_optimizers.replicas import replicas_of
from tf_optimizers.workers.steps.common_state import note_assigned
from tf_optimizers.workers.steps.kept_gradients import check_even_if_kept
from tf_optimizers.workers.steps.metric_variables import (
    depends_on_rows,
    is_zero,
    warn_unless_sum,
)
from tf_optimizers.workers.steps.replica_state import replica
from tf_optimizers.workers.steps.share import (
    Share,
    factor_of_sum,
    is_of_rows,
)
from tf_optimizers.workers.worker_replicas import (
    is_ours,
    strategy_of_replica,
)
from tf_optimizers.wrapped import wrapped_optimizers


def apply(
    original: Callable,
    optimizer: Any,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> Any:
    """Weight gradients by the replica's share, and apply the optimizer.

    Gradients are weighted only in a model's step, and only if they do not
    overwrite variables (float8 scales). A wrapper passes the weighted gradients
    to its inner optimizers, which do not weight them again. A
    `LossScaleOptimizer` calls its inner optimizer in other threads, which have
    no share; see `agree_on_overflow`.

    Raises:
        RuntimeError: If the call is outside of `strategy.run`, except with one
            replica, a built optimizer and no active scope; or if workers have
            different optimizers or weights in the optimizer's first step.
        ValueError: If variables were created outside of the strategy's scope,
            or if there is not one gradient per variable.
        tf.errors.InvalidArgumentError: See `check_even_if_kept`.
    """
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    _build_for_all(optimizer, trainable_variables)
    variables = trainable_variables
    if variables is None:
        variables = built_variables(optimizer)
    _check_same(optimizer, variables)
    grads = list(grads)
    if grads and replica.share is not None and not replica.is_applying:
        if len(variables) != len(grads):
            raise ValueError(
                "`apply` needs one gradient per variable. Received: "
                f"{len(grads)} gradients and {len(variables)} variables. Pass "
                "None for a variable without a gradient."
            )
        is_scaled = id(optimizer) in replica.scaled
        grads = check_even_if_kept(grads, variables, replica.share)
        grads = [
            gradient
            if is_overwritten(optimizer, variable)
            else _weighted(gradient, replica.share, is_scaled)
            for gradient, variable in zip(grads, variables, strict=True)
        ]
    with replica.set(is_applying=True):
        return original(optimizer, grads, trainable_variables)


def _build_for_all(optimizer: Any, variables: Any) -> None:
    """Build an optimizer on all replicas, in the first step that uses it.

    Keras would call `build` on the first replica only. The other replicas would
    lack the values that `build` assigns, such as the copies of weights that
    `ScheduleFreeAdamW` makes. An optimizer that was created outside of the
    strategy's scope is moved into the strategy.
    """
    is_known = optimizer.built and is_adopted(optimizer)
    maker = strategy_of(optimizer) if is_known else maker_of(variables or ())
    if maker is not None and is_ours(maker):
        # Outside of `run`, an optimizer that is already built would update each
        # worker's weights independently.
        check_in_run(maker, optimizer.built)
    strategy = strategy_of_replica()
    if strategy is None:
        return
    check_made_inside(strategy, variables or ())
    if is_known:
        return

    def build() -> None:
        with keras.name_scope(optimizer.name, caller=optimizer):
            for each in wrapped_optimizers(optimizer):
                adopt(each, variables or ())
            # Without variables, Keras builds nothing or raises an error.
            if variables and not optimizer.built:
                optimizer.build(variables)

    call_for_all(build)


def _check_same(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise unless all workers have the same optimizer and weights.

    Only an optimizer's first step compares anything. Our own optimizers make
    this check themselves, after they have checked their gradients. For inner
    optimizers, the wrapper has made the check.
    """
    strategy = strategy_of_replica()
    if strategy is None or replica.is_applying or has_hooks(optimizer):
        return
    replicas_of(strategy).check_same_optimizer(optimizer, variables)


def check_made_inside(strategy: Any, variables: Sequence[Any]) -> None:
    """Raise if variables were created outside of the strategy's scope.

    Several replicas would share such a variable, and each would wait for the
    others to update it. With one replica, TensorFlow's error does not suggest a
    remedy.
    """
    outside = made_outside(strategy, variables)
    if outside:
        names = [getattr(each, "path", each.name) for each in outside]
        raise ValueError(
            "Variables that an optimizer updates must be created in the "
            "strategy's scope. Received: variables created outside of it: "
            f"{', '.join(names)}. Create and build the model in `with "
            "strategy.scope():`."
        )


def _weighted(gradient: Any, share: Share, is_scaled: bool) -> Any:
    """Return a gradient times the replica's share.

    If `is_scaled`, the loss was scaled by the share, so the gradient already
    includes the share. If the replica has no rows, return zeros, even if the
    gradient is NaN.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _weighted(gradient.values, share, is_scaled)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    gradient = tf.convert_to_tensor(gradient)
    if not is_scaled:
        weight = tf.cast(share.weight, gradient.dtype)
        return tf.math.multiply_no_nan(gradient, weight)
    # A multiplication by 1 or 0 would take another pass through memory.
    weighted = tf.cond(
        share.has_rows, lambda: gradient, lambda: tf.zeros_like(gradient)
    )
    return tf.ensure_shape(weighted, gradient.shape)


def scale_loss(original: Callable, optimizer: Any, loss: Any) -> Any:
    """Scale a loss before its gradients are taken.

    In Keras's own step, and with a `LossScaleOptimizer`, all gradients come
    from this loss. So this function multiplies the loss by the replica's share,
    before gradients can overflow. In other steps, only `apply` multiplies by
    the share.
    """
    loss, share = original(optimizer, loss), replica.share
    if share is None:
        return loss
    replica.scaled.add(id(optimizer))
    return loss * tf.cast(share.weight, loss.dtype)


def scaling_loss(optimizer: Any) -> list[Attribute]:
    """Return the attributes for `replaced` that scale the loss of Keras's step.

    The list is empty for a `LossScaleOptimizer`, whose class is patched; see
    `patches.py`.
    """
    dynamic = keras.optimizers.LossScaleOptimizer
    if optimizer is None or isinstance(optimizer, dynamic):
        return []
    original = type(optimizer).scale_loss
    by = functools.partial(scale_loss, original, optimizer)
    return [(optimizer, "scale_loss", by)]


def gradient(
    original: Callable,
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return the gradient of a target with respect to sources.

    The gradient of an array is the gradient of the sum of its elements. In a
    model's step, a target may be an array with an element for each row. If so,
    and if a source is a variable, this function divides the gradient by the
    replica's share, since `scale_loss` or `apply` multiplies by the share. So
    the replicas' gradients add up to the gradient of the sum over all rows. If
    the caller passes `output_gradients`, nothing is divided. Results of
    `tf.gradients` are not divided either.
    """
    if replica.share is not None and output_gradients is None:
        output_gradients = _output_gradients(target, sources)
    return original(tape, target, sources, output_gradients, *args, **kwargs)


def _output_gradients(target: Any, sources: Any) -> list[tf.Tensor] | None:
    """Return factors for the elements of all targets; see `gradient`.

    Return None unless a source is a variable, all targets are tensors, and at
    least one target is not a scalar.
    """
    kinds = keras.Variable, tf.Variable
    if not any(isinstance(each, kinds) for each in tf.nest.flatten(sources)):
        return None
    targets = tf.nest.flatten(target)
    if not all(isinstance(each, tf.Tensor) for each in targets):
        return None
    if not any(each.shape.rank for each in targets):
        return None
    return [
        tf.cast(factor_of_sum(each), each.dtype) * tf.ones_like(each)
        for each in targets
    ]


def update_mean(
    original: Callable, metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Update a `Mean`; in a model's step, weight a number by the share."""
    if replica.note_metric is not None:
        replica.note_metric(metric)
    if replica.share is not None and not is_of_rows(values):
        sample_weight = _weight_of_numbers(values, sample_weight)
    return original(metric, values, sample_weight)


def _weight_of_numbers(values: Any, weight: Any) -> Any:
    """Return the weight of a number, multiplied by the replica's share.

    If the step passes no weight, the weight is 1. If the step passes the number
    of the replica's rows, or weights of rows, return this weight unchanged.
    """
    if weight is None:
        weight = tf.ones(keras.ops.shape(values)[:1])
    elif _is_number_of_rows(weight) or is_of_rows(weight):
        return weight
    share = tf.cast(replica.share.weight, tf.float32)
    return tf.cast(weight, tf.float32) * share


def _is_number_of_rows(weight: Any) -> bool:
    """Return whether a weight is a number of rows, or a sum of rows' weights.

    In eager mode, this is assumed of each scalar tensor. A constant must equal
    the replica's number of rows. A tensor in a graph must depend on an input.
    """
    if len(keras.ops.shape(weight)):
        return False
    if tf.is_tensor(weight) and tf.executing_eagerly():
        return True
    known = tf.get_static_value(weight) if tf.is_tensor(weight) else weight
    if isinstance(known, (int, float, np.generic, np.ndarray)):
        return isinstance(replica.rows, int) and known == replica.rows
    return depends_on_rows(tf.convert_to_tensor(weight))


def assign(original: Callable, variable: keras.Variable, value: Any) -> Any:
    """Assign a value to a Keras variable.

    In a model's step, a replica without rows leaves variables of metrics
    unchanged, except that it may reset them to 0. An assignment to another
    variable is recorded for `CommonState`, unless an optimizer makes the
    assignment. If a model's step itself assigns a trainable variable,
    `RestoredWeights` may replace the value.
    """
    if variable.synchronization != "on_read":
        if not replica.is_applying:
            note_assigned(variable, replica.model, replica.is_training)
            if variable.trainable and replica.weights is not None:
                value = replica.weights.exact(variable, value)
        return original(variable, value)
    if replica.share is None:
        # If the value is a variable, read it here: under `is_assigning`, this
        # would return one replica's value.
        value = tf.convert_to_tensor(tf.cast(value, variable.dtype))
        with replica.set(is_assigning=True):
            assigned = original(variable, value)
        if tf.as_dtype(variable.dtype).is_integer:
            _divide_among_replicas(variable, value)
        return assigned
    if replica.is_applying:
        return original(variable, value)
    value = tf.cast(value, variable.dtype)
    old = tf.cast(tf.convert_to_tensor(variable), value.dtype)
    replica.updated[id(variable)] = variable
    warn_unless_sum(variable, old, value, replica.rows)
    if not is_zero(value):
        value = tf.where(replica.share.has_rows, value, old)
    return original(variable, value)


def _divide_among_replicas(variable: keras.Variable, value: Any) -> None:
    """Divide integers among the copies of a metric's variable.

    Outside of `strategy.run`, TensorFlow assigns `value` / replicas to each
    copy, and drops the remainder.
    """
    strategy = maker_of([variable])
    if strategy is None or not is_ours(strategy) or strategy_of_replica():
        return
    if variable.aggregation != "sum":
        return
    extended, replicas = strategy.extended, strategy.num_replicas_in_sync
    value = tf.cast(value, variable.dtype)
    parts = strategy.experimental_local_results(variable.value)
    first = extended.worker_index * len(parts)
    for number, part in enumerate(parts, first):
        extra = tf.cast(number < value % replicas, value.dtype)
        part.assign(value // replicas + extra)
