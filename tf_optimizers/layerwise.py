"""What Lamb and LANS share: Adam's moments, directions, one trust ratio each.

A step of one variable reads and writes memory twice, in two kernels, because
no weight can move before the norm of the whole direction is known:

    accumulate   m, v <- gradient;  squared norms of w and of each direction
    move         w <- w - learning_rate sum(share * ratio * direction)

The directions are computed in both, which costs less than storing them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_optimizers.checks import (
    check_decay_rate,
    check_epsilon,
    check_non_negative,
    check_patterns,
    check_positive,
)
from tf_optimizers.kernels import assign, compiled, read
from tf_optimizers.norms import norm, partial_squares
from tf_optimizers.replicas import backend_variable, local_component
from tf_optimizers.weight_decay import DecayedOptimizer, is_match


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


class LayerwiseOptimizer(DecayedOptimizer):
    """Adam's moments, with steps in proportion to the norm of each variable.

    Args:
        learning_rate: See `Optimizer`.
        beta_1: float in [0, 1).
        beta_2: float in [0, 1).
        epsilon: float > 0.
        weight_decay: float >= 0.
        exclude_from_weight_decay: None or patterns; see `DecayedOptimizer`.
        exclude_from_layer_adaptation: None or patterns of variables whose
            trust ratio is 1; None means those that are not decayed.
        lower_bound: None or float >= 0. Least norm of w in the trust ratio.
        upper_bound: None or float > 0. Greatest norm of w in the trust ratio.
        **kwargs: See `keras.optimizers.Optimizer`.
    """

    rule: Rule

    def __init__(
        self,
        learning_rate: Any,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        weight_decay: float | None,
        exclude_from_weight_decay: Sequence[str] | None,
        exclude_from_layer_adaptation: Sequence[str] | None,
        lower_bound: float | None,
        upper_bound: float | None,
        **kwargs: Any,
    ) -> None:
        beta_1 = check_decay_rate("beta_1", beta_1)
        beta_2 = check_decay_rate("beta_2", beta_2)
        epsilon = check_epsilon("epsilon", epsilon)
        lower_bound, upper_bound = _check_bounds(lower_bound, upper_bound)
        patterns = check_patterns(
            "exclude_from_layer_adaptation", exclude_from_layer_adaptation
        )
        super().__init__(
            learning_rate, weight_decay, exclude_from_weight_decay, **kwargs
        )
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.exclude_from_layer_adaptation = patterns
        self.lower_bound = lower_bound
        self.upper_bound = upper_bound

    def build(self, variables: Sequence[Any]) -> None:
        """Create m and v of each variable, in its shape and at least float32.

        Patterns are matched here: under a strategy `update_step` is handed
        variables without a path.
        """
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )
        self._decayed = tuple(map(self.is_decayed, variables))
        self._adapted = tuple(map(self.is_adapted, variables))

    def is_adapted(self, variable: Any) -> bool:
        """Tell whether the variable's step gets a trust ratio."""
        if self.exclude_from_layer_adaptation is None:
            return self.is_decayed(variable)
        return not is_match(self.exclude_from_layer_adaptation, variable)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        patterns = self.exclude_from_layer_adaptation
        return super().get_config() | {
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "exclude_from_layer_adaptation": patterns and list(patterns),
            "lower_bound": self.lower_bound,
            "upper_bound": self.upper_bound,
        }

    def _coefficients(self, index: int) -> Coefficients:
        return Coefficients(
            self.beta_1,
            self.beta_2,
            self.epsilon,
            self.weight_decay if self._decayed[index] else 0.0,
            self.lower_bound,
            self.upper_bound,
        )

    def update_step(
        self, gradient: tf.Tensor, variable: Any, learning_rate: Any
    ) -> None:
        """Update one variable, or its component on this device.

        Args:
            gradient: Dense, of the variable's shape and its state's dtype.
            variable: A variable that the optimizer was built with.
            learning_rate: Scalar.
        """
        index = self.variable_index(variable)
        variable = backend_variable(variable)
        weight = self.full_precision(variable)
        step = compiled(
            layerwise_step,
            weight.shape,
            weight.dtype,
            self.rule,
            self._coefficients(index),
            self._adapted[index],
            xla=False,
        )
        step(
            weight.handle,
            local_component(self._momentums[index], variable).handle,
            local_component(self._velocities[index], variable).handle,
            gradient,
            tf.cast(learning_rate, weight.dtype),
            tf.cast(self.iterations + 1, weight.dtype),
        )
        self.store_weight(variable, weight)


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


def _check_bounds(
    lower: float | None, upper: float | None
) -> tuple[float | None, float | None]:
    if lower is not None:
        lower = check_non_negative("lower_bound", lower)
    if upper is not None:
        upper = check_positive("upper_bound", upper)
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(
            "`lower_bound` must be at most `upper_bound`. Received: "
            f"lower_bound={lower}, upper_bound={upper}."
        )
    return lower, upper
