"""Steps Lamb or LANS on variables of one shape, as one XLA kernel.

No weight can move before the norms of whole directions are known:

    accumulate   m, v <- gradient
    measure      |w|, and |d| of each direction d
    move         w <- w - learning_rate sum(share (|w| / |d|) d)

The move computes the directions again, which costs less than storing them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_optimizers.kernels import (
    Betas,
    assign,
    bias_correction,
    norms,
    read,
    scalar,
    update_moments,
)


class LayerwiseHyperparameters(NamedTuple):
    """The numbers of a variable's step; in a kernel, scalars of float64."""

    betas: Betas
    epsilon: float
    weight_decay: float
    lower_bound: float | None = None
    upper_bound: float | None = None


class Corrections(NamedTuple):
    """What the moments are multiplied by to correct their bias: scalars."""

    m: tf.Tensor  # 1 / (1 - beta_1^step)
    root_of_v: tf.Tensor  # 1 / sqrt(1 - beta_2^step)


class Rule(NamedTuple):
    """What distinguishes layerwise optimizers.

    `directions(hyperparameters, weight, gradient, m, v, corrections)` returns
    those that the step goes along, each by its share of the learning rate;
    that of m^ comes first. It gets whole tensors, or blocks of them.
    `prepare(norm, limit)` takes the float64 norm of the gradient; it returns a
    function from blocks of the gradient to those to follow, or is None if that
    is the gradient itself.
    """

    directions: Callable[..., list[tf.Tensor]]
    shares: tuple[float, ...] = (1.0,)
    prepare: Callable[..., Callable] | None = None
    limit: float | None = None


def layerwise_steps(
    count: int,
    gpu: bool,
    rule: Rule,
    hyperparameters: LayerwiseHyperparameters,
    adapted: bool,
    weights: Sequence[tf.Tensor],
    ms: Sequence[tf.Tensor],
    vs: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor],
    learning_rate: tf.Tensor,
    corrections: Corrections,
) -> None:
    """Update `count` variables, each by itself; see `layerwise_step`."""
    constants = gpu, rule, hyperparameters, adapted
    for i in range(count):
        state = weights[i], ms[i], vs[i], gradients[i]
        layerwise_step(*constants, *state, learning_rate, corrections)


def layerwise_step(
    gpu: bool,
    rule: Rule,
    hyperparameters: LayerwiseHyperparameters,
    adapted: bool,
    weight: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    gradient: tf.Tensor,
    learning_rate: tf.Tensor,
    corrections: Corrections,
) -> None:
    """Update in place the variables behind the handles `weight`, `m`, `v`.

    They have the shape and dtype of `gradient`; `gpu` says where they are.
    """
    w, old_m, old_v = (read(handle, gradient) for handle in (weight, m, v))
    follow, w_norm = _gradient_to_follow(gpu, rule, gradient, w)
    new_m, new_v = update_moments(
        hyperparameters.betas, follow(gradient), old_m, old_v
    )
    state = (w, gradient, new_m, new_v)

    def along(w: tf.Tensor, g: tf.Tensor, m: tf.Tensor, v: tf.Tensor) -> list:
        state = w, follow(g), m, v
        return rule.directions(hyperparameters, *state, corrections)

    rates = [learning_rate for _ in rule.shares]
    if adapted:
        measured = _norms(gpu, along, w_norm, state)
        ratios = trust_ratios(hyperparameters, *measured)
        rates = [learning_rate * tf.cast(ratio, w.dtype) for ratio in ratios]
    for direction, share, rate in zip(
        along(*state), rule.shares, rates, strict=True
    ):
        w -= rate * scalar(share, w) * direction
    assign(m, new_m)
    assign(v, new_v)
    assign(weight, w)


def corrections_at(
    log_beta_1: float, log_beta_2: float, step: tf.Tensor
) -> Corrections:
    """Return those at a step, which counts from 1."""
    root = tf.sqrt(bias_correction(log_beta_2, step))
    return Corrections(1.0 / bias_correction(log_beta_1, step), 1.0 / root)


def momentum_ratio(
    gpu: bool,
    rule: Rule,
    hyperparameters: LayerwiseHyperparameters,
    weight: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    corrections: Corrections,
) -> tf.Tensor:
    """Return the trust ratio of the direction of m^."""

    def vectors(w: tf.Tensor, m: tf.Tensor, v: tf.Tensor) -> list[tf.Tensor]:
        # The gradient is in the other direction only.
        state = w, m, m, v
        return [w, rule.directions(hyperparameters, *state, corrections)[0]]

    measured = norms(vectors, weight, m, v, gpu=gpu)
    return trust_ratios(hyperparameters, *measured)[0]


def trust_ratios(
    hyperparameters: LayerwiseHyperparameters,
    weight_norm: tf.Tensor,
    *norms: tf.Tensor,
) -> list[tf.Tensor]:
    """Return phi(weight_norm) / norm for each norm, or 1 if either is 0.

    phi clamps to the bounds. NaN stays NaN: it must reach the weights.
    """
    phi = weight_norm
    if hyperparameters.lower_bound is not None:
        phi = tf.maximum(phi, hyperparameters.lower_bound)
    if hyperparameters.upper_bound is not None:
        phi = tf.minimum(phi, hyperparameters.upper_bound)
    return [
        tf.where((phi == 0) | (norm == 0), tf.ones_like(phi), phi / norm)
        for norm in norms
    ]


def _gradient_to_follow(
    gpu: bool, rule: Rule, gradient: tf.Tensor, w: tf.Tensor
) -> tuple[Callable[[tf.Tensor], tf.Tensor], tf.Tensor | None]:
    """Return a function that prepares a gradient's block, and |w| if known."""
    if rule.prepare is None:
        return lambda block: block, None
    # Two norms cost hardly more than one.
    norm, w_norm = norms(lambda *blocks: blocks, gradient, w, gpu=gpu)
    return rule.prepare(norm, rule.limit), w_norm


def _norms(
    gpu: bool, directions: Callable, w_norm: tf.Tensor | None, state: tuple
) -> list[tf.Tensor]:
    """Return |w| and the norms of the directions."""
    if w_norm is not None:
        return [w_norm, *norms(directions, *state, gpu=gpu)]
    return norms(lambda w, *rest: [w, *directions(w, *rest)], *state, gpu=gpu)
