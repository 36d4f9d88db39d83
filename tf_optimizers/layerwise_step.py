"""One step of Lamb or LANS on one variable, in two passes over memory.

No weight can move before the norm of the whole direction is known:

    accumulate   m, v <- gradient;  squared norms of w and of each direction
    move         w <- w - learning_rate sum(share * ratio * direction)

The directions are computed in both, which costs less than storing them.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_optimizers.kernels import assign, compiled, read
from tf_optimizers.norms import norm, partial_squares


class Coefficients(NamedTuple):
    """The constants of a variable's step."""

    beta_1: float
    beta_2: float
    epsilon: float
    weight_decay: float
    lower_bound: float | None = None
    upper_bound: float | None = None
    clip_normalized_gradient: float | None = None


class Direction(NamedTuple):
    """A part of the update: its share of the step, and where it points."""

    share: float
    vector: tf.Tensor


class Rule(NamedTuple):
    """What tells one layerwise optimizer from another: two pure functions.

    `directions(coefficients, weight, gradient, m, v, step)` returns where the
    step leads; `prepare(coefficients, gradient, norm)` the gradient to follow,
    None if that is the gradient itself.
    """

    directions: Callable[..., Sequence[Direction]]
    prepare: Callable[..., tf.Tensor] | None = None


def layerwise_step(
    rule: Rule,
    coefficients: Coefficients,
    adapted: bool,
    weight: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    gradient: tf.Tensor,
    learning_rate: tf.Tensor,
    step: tf.Tensor,
) -> None:
    """Update in place the variables behind the handles `weight`, `m`, `v`.

    Args:
        rule: Of the optimizer.
        coefficients: Of the variable.
        adapted: Whether the trust ratio is taken.
        weight: Resource handle, likewise `m` and `v`.
        m: Adam's first moment.
        v: Adam's second moment.
        gradient: Of the variables' shape and dtype.
        learning_rate: Scalar.
        step: Scalar, counted from 1.
    """
    constants = (gradient.shape, gradient.dtype, rule, coefficients)
    gradient_norm = norm(gradient) if rule.prepare else None
    weight_squares, squares = compiled(accumulate, *constants)(
        weight, m, v, gradient, gradient_norm, step
    )
    rates = [learning_rate for _ in squares]
    if adapted:
        ratios = trust_ratios(coefficients, weight_squares, squares)
        rates = [learning_rate * tf.cast(r, gradient.dtype) for r in ratios]
    compiled(move, *constants)(
        weight, m, v, gradient, gradient_norm, step, rates
    )


def update_moments(
    coefficients: Coefficients, gradient: tf.Tensor, m: tf.Tensor, v: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return Adam's moments of the gradient and of its square."""
    beta_1, beta_2 = coefficients.beta_1, coefficients.beta_2
    m = beta_1 * m + (1 - beta_1) * gradient
    # The root first: the square of 1e20 alone overflows float32.
    v = beta_2 * v + tf.square(math.sqrt(1 - beta_2) * gradient)
    # As the sum still can. XLA vectorises a select, but not a minimum.
    limit = tf.constant(v.dtype.max, v.dtype)
    return m, tf.where(v > limit, limit, v)


def accumulate(
    rule: Rule,
    coefficients: Coefficients,
    weight: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    gradient: tf.Tensor,
    gradient_norm: tf.Tensor | None,
    step: tf.Tensor,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Update m and v; return partial squares of w and of each direction."""
    w = read(weight, gradient)
    g = _prepare(rule, coefficients, gradient, gradient_norm)
    new_m, new_v = update_moments(
        coefficients, g, read(m, gradient), read(v, gradient)
    )
    assign(m, new_m)
    assign(v, new_v)
    directions = rule.directions(coefficients, w, g, new_m, new_v, step)
    return partial_squares(w), [partial_squares(d.vector) for d in directions]


def move(
    rule: Rule,
    coefficients: Coefficients,
    weight: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    gradient: tf.Tensor,
    gradient_norm: tf.Tensor | None,
    step: tf.Tensor,
    rates: list[tf.Tensor],
) -> None:
    """Move w along each direction, at its rate times its share."""
    w = read(weight, gradient)
    g = _prepare(rule, coefficients, gradient, gradient_norm)
    directions = rule.directions(
        coefficients, w, g, read(m, gradient), read(v, gradient), step
    )
    for rate, direction in zip(rates, directions, strict=True):
        w -= rate * direction.share * direction.vector
    assign(weight, w)


def trust_ratios(
    coefficients: Coefficients,
    weight_squares: tf.Tensor,
    squares: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Return phi(|w|) / |direction|, or 1 where either is 0, of each.

    phi clamps to the bounds. NaN stays NaN: it must reach the weights.
    """
    phi = tf.sqrt(tf.reduce_sum(weight_squares))
    if coefficients.lower_bound is not None:
        phi = tf.maximum(phi, coefficients.lower_bound)
    if coefficients.upper_bound is not None:
        phi = tf.minimum(phi, coefficients.upper_bound)
    norms = [tf.sqrt(tf.reduce_sum(partials)) for partials in squares]
    return [
        tf.where((phi == 0) | (norm == 0), tf.ones_like(phi), phi / norm)
        for norm in norms
    ]


def denominator(
    coefficients: Coefficients, v: tf.Tensor, step: tf.Tensor
) -> tf.Tensor:
    """Return sqrt(v / (1 - beta_2^step)) + epsilon."""
    # One root each: the quotient can overflow where the roots do not.
    correction = tf.sqrt(bias_correction(coefficients.beta_2, step))
    return tf.sqrt(v) / correction + coefficients.epsilon


def bias_correction(beta: float, step: tf.Tensor) -> tf.Tensor:
    """Return 1 - beta^step to all digits of the dtype of `step`.

    In float32, 1 - 0.999 itself is wrong by 1.3e-5.
    """
    if beta == 0.0:
        return tf.ones_like(step)
    return -tf.math.expm1(step * math.log(beta))


def _prepare(
    rule: Rule,
    coefficients: Coefficients,
    gradient: tf.Tensor,
    gradient_norm: tf.Tensor | None,
) -> tf.Tensor:
    if rule.prepare is None:
        return gradient
    return rule.prepare(coefficients, gradient, gradient_norm)
