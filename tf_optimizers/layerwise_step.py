"""One step of Lamb or LANS on one variable.

No weight can move before the norms of whole directions are known:

    accumulate   m, v <- gradient
    squares      |w|^2, and |d|^2 of each direction d
    move         w <- w - learning_rate sum(share (|w| / |d|) d)

The directions are computed again to move, which costs less than storing them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_optimizers.kernels import assign, compiled, read
from tf_optimizers.moments import bias_correction, update_moments
from tf_optimizers.norms import norm, partial_squares

# (coefficients, weight, gradient, m, v, step) -> a tensor like these
Direction = Callable[..., tf.Tensor]


class Coefficients(NamedTuple):
    """The constants of a variable's step; `shares` has one per direction."""

    beta_1: float
    beta_2: float
    epsilon: float
    weight_decay: float
    shares: tuple[float, ...]
    lower_bound: float | None = None
    upper_bound: float | None = None
    clip_normalized_gradient: float | None = None


class Rule(NamedTuple):
    """What tells one layerwise optimizer from another: pure functions.

    The step goes along each of `directions`. `prepare(coefficients, gradient,
    norm)` returns the gradient to follow; None if that is the gradient itself.
    """

    directions: tuple[Direction, ...]
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
    state = (weight, m, v, gradient, gradient_norm, step)
    compiled(accumulate, *constants)(m, v, gradient, gradient_norm)
    rates = [learning_rate for _ in rule.directions]
    if adapted:
        # In kernels of their own: directions share terms, which XLA would
        # write to memory rather than compute twice.
        weight_squares, *direction_squares = (
            compiled(squares, *constants, vector)(*state)
            for vector in (_weight, *rule.directions)
        )
        ratios = trust_ratios(coefficients, weight_squares, direction_squares)
        rates = [learning_rate * tf.cast(r, gradient.dtype) for r in ratios]
    compiled(move, *constants)(*state, rates)


def momentum_direction(
    coefficients: Coefficients,
    weight: tf.Tensor,
    gradient: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    step: tf.Tensor,
) -> tf.Tensor:
    """Return m^ / (sqrt(v^) + epsilon) + weight_decay w."""
    del gradient
    m_hat = m / bias_correction(coefficients.beta_1, step)
    decay = coefficients.weight_decay * weight
    return m_hat / denominator(coefficients, v, step) + decay


def accumulate(
    rule: Rule,
    coefficients: Coefficients,
    m: tf.Tensor,
    v: tf.Tensor,
    gradient: tf.Tensor,
    gradient_norm: tf.Tensor | None,
) -> None:
    """Update m and v."""
    g = _prepare(rule, coefficients, gradient, gradient_norm)
    new_m, new_v = update_moments(
        coefficients, g, read(m, gradient), read(v, gradient)
    )
    assign(m, new_m)
    assign(v, new_v)


def squares(
    rule: Rule, coefficients: Coefficients, vector: Direction, *state: tf.Tensor
) -> tf.Tensor:
    """Return partial squares of what `vector` makes of the state."""
    return partial_squares(vector(*_values(rule, coefficients, *state)))


def move(rule: Rule, coefficients: Coefficients, *arguments: tf.Tensor) -> None:
    """Move w along each direction, at its rate times its share."""
    *state, rates = arguments
    values = _values(rule, coefficients, *state)
    _, w, *_ = values
    for direction, share, rate in zip(
        rule.directions, coefficients.shares, rates, strict=True
    ):
        w -= rate * share * direction(*values)
    assign(state[0], w)


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


def _values(
    rule: Rule,
    coefficients: Coefficients,
    weight: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    gradient: tf.Tensor,
    gradient_norm: tf.Tensor | None,
    step: tf.Tensor,
) -> tuple:
    """Return the arguments of a direction, read from the variables."""
    return (
        coefficients,
        read(weight, gradient),
        _prepare(rule, coefficients, gradient, gradient_norm),
        read(m, gradient),
        read(v, gradient),
        step,
    )


def _weight(
    coefficients: Coefficients, weight: tf.Tensor, *_: tf.Tensor
) -> tf.Tensor:
    del coefficients
    return weight


def _prepare(
    rule: Rule,
    coefficients: Coefficients,
    gradient: tf.Tensor,
    gradient_norm: tf.Tensor | None,
) -> tf.Tensor:
    if rule.prepare is None:
        return gradient
    return rule.prepare(coefficients, gradient, gradient_norm)
