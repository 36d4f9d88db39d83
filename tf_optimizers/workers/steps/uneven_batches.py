"""Scales a replica's losses to fit its share of a global batch's rows.

In a step of a Keras model, each replica computes a loss from its rows, as one
process would. Then `step_hooks.py` weights the replica's gradients and metrics
by the replica's share:

    share = rows of the replica / rows of all replicas

So Keras must not divide losses by the number of replicas in such a step. The
following losses are multiplied by a factor, to correct for the share:

    loss                               factor
    sum, or sum / global_batch_size    1 / share
    `add_loss` with a loss per row     1 / share
    mean over unmasked elements, or    fraction / share
    `mean_with_sample_weight`

    fraction = divisor of the replica's mean / sum of all replicas' divisors

The divisor of a mean is a number of elements or a sum of weights.

In other functions that `strategy.run` calls, gradients are summed unchanged. So
a mean that Keras or TensorFlow computes is multiplied by the fraction instead
of 1 / replicas.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.patches import NAMES, hook
from tf_optimizers._compat.strategies import Attribute
from tf_optimizers.replicas import replicas_of
from tf_optimizers.workers._compat.step_functions import (
    merge_mask,
    sum_of_added_loss,
)
from tf_optimizers.workers.steps import step_hooks
from tf_optimizers.workers.steps.replica_state import replica
from tf_optimizers.workers.steps.share import factor_of_sum, sum_over_replicas
from tf_optimizers.workers.worker_replicas import strategy_of_replica

_MEANS = ("mean", "sum_over_batch_size", "mean_with_sample_weight")


@functools.cache
def weight_uneven_batches() -> None:
    """Permanently weight losses by rows under our strategy."""
    hooks: dict[str, Callable] = {
        "loss.scale_loss_for_distribution": _scale,
        "loss.unscale_loss_for_distribution": _scale,
        "loss.reduce_weighted_values": _reduce,
        "nn.compute_average_loss": _average,
        "nn.scale_regularization_loss": _regularize,
        "BatchNormalization._moments": _moments,
        "Optimizer.apply": step_hooks.apply,
        "LossScaleOptimizer.apply": step_hooks.apply,
        "MultiOptimizer.apply": step_hooks.apply,
        "LossScaleOptimizer.scale_loss": step_hooks.scale_loss,
        "Mean.update_state": step_hooks.update_mean,
        "Variable.assign": step_hooks.assign,
        "GradientTape.gradient": step_hooks.gradient,
    }
    for key, function in hooks.items():
        # Keras 3.15 added `MultiOptimizer`.
        if key in NAMES or key != "MultiOptimizer.apply":
            hook(key, tf.autograph.experimental.do_not_convert(function))


def _scale(original: Callable, loss: tf.Tensor) -> tf.Tensor:
    """Scale or unscale a loss as Keras does, except in a model's step."""
    return original(loss) if replica.share is None else loss


def _regularize(original: Callable, loss: tf.Tensor) -> tf.Tensor:
    """Sum a regularization loss; in a model's step, do not scale the sum."""
    return original(loss) if replica.share is None else tf.reduce_sum(loss)


def weighted_losses(model: keras.Model, is_keras: bool) -> list[Attribute]:
    """Return the attributes for `replaced` that scale a model's losses.

    `is_keras` is True if the step is Keras's own `train_step`.
    """
    scaling = step_hooks.scaling_loss(model.optimizer) if is_keras else []
    return [sum_of_added_loss(model, _sum_added_loss), *scaling]


def _sum_added_loss(original: Callable, loss: tf.Tensor) -> tf.Tensor:
    """Sum a loss from `add_loss`; see `sum_of_added_loss`.

    If the loss has an element for each row, divide the sum by the replica's
    share, since gradients are multiplied by the share later.
    """
    total = original(loss)
    if replica.share is None:
        return total
    return total * _cast(factor_of_sum(loss), total)


def _average(
    original: Callable,
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> tf.Tensor:
    """Average the losses of examples.

    In a model's step, return the average over the replica's rows or, with
    `global_batch_size`, the sum of losses / `global_batch_size` / share. In
    other functions, return the replica's part of the average over all rows: the
    replicas' parts add up to this average.
    """
    share = replica.share
    if share is None:
        if global_batch_size is None and _is_replica_of_ours():
            return _average_of_loop(original, per_example_loss, sample_weight)
        return original(per_example_loss, sample_weight, global_batch_size)
    if global_batch_size is None:
        rows = tf.shape(per_example_loss)[0]
        return original(per_example_loss, sample_weight, rows)
    loss = original(per_example_loss, sample_weight, global_batch_size)
    return loss * tf.cast(share.inverse, loss.dtype)


def _average_of_loop(
    original: Callable, per_example_loss: Any, sample_weight: Any
) -> tf.Tensor:
    """Return a replica's part of the mean over all rows, in a custom loop."""
    if replica.loop is not None and replica.loop.has_same_arguments:
        return original(per_example_loss, sample_weight)
    rows = tf.shape(per_example_loss)[0]
    loss = original(per_example_loss, sample_weight, rows)
    exchange = functools.partial(_fraction, tf.cast(rows, tf.float32))
    known = replica.loop and replica.loop.rows_of_batch(rows)
    if not known:
        return loss * _cast(exchange(), loss)
    *counts, is_certain = known
    own, total = (tf.cast(count, tf.float32) for count in counts)
    fraction = tf.math.divide_no_nan(own, total)
    if is_certain is not True:
        fraction = tf.cond(is_certain, lambda: fraction, exchange)
    return loss * _cast(fraction, loss)


def _reduce(
    original: Callable,
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: Any = "sum_over_batch_size",
    dtype: Any = None,
) -> tf.Tensor:
    """Reduce the losses of elements, and scale the result for this replica."""
    if replica.is_adding_up:  # The replicas' sums are added later.
        return original(values, sample_weight, mask, reduction, dtype)
    is_mean, share = reduction in _MEANS, replica.share
    is_number = tuple(values.shape) == ()
    is_weighted = sample_weight is not None or mask is not None
    if is_number and is_weighted and share and (is_mean or reduction == "sum"):
        number = original(values, None, None, reduction, dtype)
        factor = _weight_of_number(sample_weight, mask, reduction)
        return number * _cast(factor, number)
    loss = original(values, sample_weight, mask, reduction, dtype)
    if not (is_mean or reduction == "sum") or not _is_replica_of_ours():
        return loss
    if is_number and not is_weighted:
        # A scalar loss counts as a mean over the replica's rows. Outside of a
        # model's step, gradients of the replicas' means are summed, and Keras
        # does not divide a scalar by the number of replicas.
        return loss if share or not is_mean else loss / replicas_of().count
    if not is_mean:
        return loss * _cast(factor_of_sum(values), loss) if share else loss
    divisors = _divisors(sample_weight, mask, reduction)
    if divisors is None and share:
        return loss
    divisors = tf.ones_like(values) if divisors is None else divisors
    fraction = _fraction(tf.reduce_sum(tf.cast(divisors, tf.float32)))
    # Outside of a model's step, undo Keras's division by the number of
    # replicas.
    factor = _cast(share.inverse if share else replicas_of().count, fraction)
    return loss * _cast(fraction * factor, loss)


def _weight_of_number(
    sample_weight: Any, mask: Any, reduction: str
) -> tf.Tensor:
    """Return the factor for a scalar loss with sample weights or a mask.

    Keras multiplies the loss by each weight, and reduces the products. So the
    factor is a reduction of all replicas' weights: their sum; the mean of those
    not masked; or, for `mean_with_sample_weight`, 1 if the sum is positive,
    else 0.
    """
    weights = tf.cast(merge_mask(sample_weight, mask, "none"), tf.float32)
    counts = tf.ones_like(weights) if mask is None else mask
    total = sum_over_replicas(tf.reduce_sum(weights))
    if reduction == "mean_with_sample_weight":
        return tf.cast(total > 0, tf.float32)
    if reduction == "sum":
        return total
    count = sum_over_replicas(tf.reduce_sum(tf.cast(counts, tf.float32)))
    return tf.math.divide_no_nan(total, count)


def _divisors(sample_weight: Any, mask: Any, reduction: str) -> Any:
    """Return the weights whose sum is the divisor of a mean.

    Return None if the divisor is the number of elements.
    """
    by_weight = reduction == "mean_with_sample_weight"
    if not by_weight or sample_weight is None:
        return mask
    return merge_mask(sample_weight, mask, reduction)


def _fraction(divisor: tf.Tensor) -> tf.Tensor:
    """Return this replica's fraction of the sum of all replicas' divisors.

    The fraction is 0 if the replica has no rows, or if the sum is 0.
    """
    if replica.share is not None:
        divisor = tf.where(replica.share.has_rows, divisor, 0.0)
    return tf.math.divide_no_nan(divisor, sum_over_replicas(divisor))


def _cast(factor: tf.Tensor, loss: tf.Tensor) -> tf.Tensor:
    return tf.cast(factor, loss.dtype)


def _moments(
    original: Callable, layer: Any, inputs: tf.Tensor, *args: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the mean and variance of a batch, for `BatchNormalization`.

    If the layer is `synchronized`, the result covers the rows of all replicas.
    Otherwise, a replica without rows gets the moving mean and variance.
    """
    if not _is_replica_of_ours():
        return original(layer, inputs, *args)
    has_rows = tf.size(inputs) > 0
    if replica.share is not None:
        has_rows = has_rows & replica.share.has_rows
    if layer.synchronized:
        rows = tf.where(has_rows, tf.shape(inputs)[0], 0)
        given = (None if x is None else x[:rows] for x in (inputs, *args))
        if replica.share is None:
            return _synchronized(original, layer, *given)
        own, *others = given
        own = _with_gradient_times(replica.share.inverse, own)
        found = _synchronized(original, layer, own, *others)
        return tuple(
            _with_gradient_times(replica.share.weight, each) for each in found
        )
    moving = layer.moving_mean, layer.moving_variance
    return tuple(
        tf.where(has_rows, new, tf.cast(old, new.dtype))
        for old, new in zip(moving, original(layer, inputs, *args), strict=True)
    )


def _synchronized(
    original: Callable, layer: Any, inputs: tf.Tensor, mask: Any = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the mean and variance over all replicas.

    With a mask, Keras (3.15) uses only the replica's rows. So this function
    combines the statistics of all replicas. Each replica's statistics are
    weighted by its number of unmasked positions.
    """
    mean, variance = own = original(layer, inputs, mask)
    if mask is None:
        return own
    count = tf.reduce_sum(tf.cast(mask, mean.dtype))
    # Keras divides sums by this number.
    divisor = count + keras.backend.epsilon()
    group = replicas_of()
    total, means = group.sum([count, mean * divisor])
    total += keras.backend.epsilon()
    common = means / total
    squares = variance * divisor + count * tf.square(mean - common)
    return common, group.sum(squares) / total


def _with_gradient_times(factor: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Return `values` unchanged; multiply their gradients by `factor`.

    Each replica receives gradients of synchronized statistics from all
    replicas. In a custom step, `apply` multiplies these gradients by the
    receiver's share. But they must be multiplied by the sender's share. So
    `_moments` multiplies them by the sender's share, and divides them by the
    receiver's share. If `scale_loss` has multiplied the sender's loss by its
    share, as in Keras's own step, they are left as they are.
    """

    def multiply(upstream: tf.Tensor) -> tf.Tensor:
        return (
            upstream if replica.scaled else upstream * _cast(factor, upstream)
        )

    @tf.custom_gradient
    def same(values: tf.Tensor) -> Any:
        return values, multiply

    return same(values)


def _is_replica_of_ours() -> bool:
    """Return whether the caller is one of several replicas of our strategy."""
    strategy = strategy_of_replica()
    return strategy is not None and strategy.num_replicas_in_sync > 1
