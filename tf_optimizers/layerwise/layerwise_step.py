"""Functions that the kernels of Lamb and LANS share."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_optimizers.kernels import Betas, bias_correction, norms


class LayerwiseHyperparameters(NamedTuple):
    """The hyperparameters for one variable's step.

    Inside a kernel, each float is a float64 scalar tensor; see `compiled`.
    """

    betas: Betas
    epsilon: float
    weight_decay: float
    is_adapted: bool = True
    lower_bound: float | None = None
    upper_bound: float | None = None
    gradient_limit: float | None = None


class Corrections(NamedTuple):
    """Scalar factors that correct the bias of the moments."""

    m: tf.Tensor  # 1 / (1 - beta_1^step)
    root_of_v: tf.Tensor  # 1 / sqrt(1 - beta_2^step)


def step_each(
    count: int,
    kernel: Callable,
    gpu: bool,
    hyperparameters: LayerwiseHyperparameters,
    handles: Sequence[Sequence[tf.Tensor]],
    gradients: Sequence[tf.Tensor],
    learning_rate: tf.Tensor,
    step: tf.Tensor,
) -> None:
    """Call a kernel such as `lamb_step` for each of `count` variables."""
    for i in range(count):
        state = handles[i], gradients[i]
        kernel(gpu, hyperparameters, *state, learning_rate, step)


def corrections_at(
    betas: Betas, step: tf.Tensor, dtype: tf.DType
) -> Corrections:
    """Return the bias corrections after `step` updates of the moments."""
    step = tf.cast(step, dtype)
    root = tf.sqrt(bias_correction(betas.log_of_v, step))
    return Corrections(1.0 / bias_correction(betas.log_of_m, step), 1.0 / root)


def trust_ratio(
    hyperparameters: LayerwiseHyperparameters,
    weight_norm: tf.Tensor,
    norm: tf.Tensor,
) -> tf.Tensor:
    """Return phi(weight_norm) / norm, or 1 if phi(weight_norm) or norm is 0.

    phi clamps a norm to the bounds, but does not change NaN.
    """
    phi = weight_norm
    if hyperparameters.lower_bound is not None:
        phi = tf.maximum(phi, hyperparameters.lower_bound)
    if hyperparameters.upper_bound is not None:
        phi = tf.minimum(phi, hyperparameters.upper_bound)
    return tf.where((phi == 0) | (norm == 0), tf.ones_like(phi), phi / norm)


def trust_ratio_from_moments(
    gpu: bool,
    direction: Callable,
    hyperparameters: LayerwiseHyperparameters,
    weight: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    step: tf.Tensor,
) -> tf.Tensor:
    """Return the trust ratio for a weight and the moments m and v."""
    corrections = corrections_at(hyperparameters.betas, step, weight.dtype)

    def vectors(w: tf.Tensor, m: tf.Tensor, v: tf.Tensor) -> list[tf.Tensor]:
        return [w, direction(hyperparameters, w, m, v, corrections)]

    measured = norms(vectors, weight, m, v, gpu=gpu)
    return trust_ratio(hyperparameters, *measured)
