"""LAMB: Adam with one trust ratio per variable."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tf_optimizers.kernels import assign, norms, read, scalar, update_moments
from tf_optimizers.layerwise.layerwise_optimizer import LayerwiseOptimizer
from tf_optimizers.layerwise.layerwise_step import (
    Corrections,
    LayerwiseHyperparameters,
    corrections_at,
    trust_ratio,
)


@keras.saving.register_keras_serializable(package="tf_optimizers")
class Lamb(LayerwiseOptimizer):
    """LAMB: Adam with steps in proportion to the norm of each variable.

    For variable w with gradient g at step t, counted from 1:

        m <- beta_1 m + (1 - beta_1) g
        v <- beta_2 v + (1 - beta_2) g^2
        u <- m^ / (sqrt(v^) + epsilon) + weight_decay w
        w <- w - learning_rate (phi(|w|) / |u|) u

    m^ = m / (1 - beta_1^t), v^ = v / (1 - beta_2^t); |x| is the L2 norm of the
    whole variable; phi clamps to [lower_bound, upper_bound]. The trust ratio
    phi(|w|) / |u| is 1 if phi(|w|) or |u| is 0, and for variables that are
    excluded from layer adaptation.

    State: m and v, each with the shape of w: together 8 bytes per parameter in
    float32, or 16 in float64 if w is float64. Float16 and bfloat16 variables
    also get float32 master weights, 4 bytes more.
    Traffic: the strategy's all-reduce of the gradients.
    Sparse gradients: made dense after the exchange, or before it with
    `gradient_accumulation_steps` or `loss_scale_factor`; duplicate rows are
    summed. The update is dense.
    NaN and inf: a NaN or inf in the gradient makes the variable not finite.
    Differs from the paper: the trust ratio is 1 if phi(|w|) or |u| is 0.
    Differs from `paddle.optimizer.Lamb`: the trust ratio also applies with
    `weight_decay=0`, as in Paddle up to 2.5. To turn the trust ratio off, pass
    `exclude_from_layer_adaptation=[""]`.
    Differs from `keras.optimizers.Lamb`: weight decay is inside the trust
    ratio; gradients are summed over replicas before they are clipped; the state
    of half-precision variables is float32; `epsilon` and `weight_decay` have
    different defaults.

    Args:
        learning_rate: float >= 0, `LearningRateSchedule`, or callable without
            arguments. Defaults to `1e-3`.
        beta_1: float in [0, 1). Decay of m, per step. Defaults to `0.9`.
        beta_2: float in [0, 1). Decay of v, per step. Defaults to `0.999`.
        epsilon: float > 0. Added to sqrt(v^). Defaults to `1e-6`.
        weight_decay: float >= 0. Applied inside the trust ratio; None means 0.
            Defaults to `0.01`.
        exclude_from_weight_decay: None or a sequence of regular expressions,
            such as `tfo.BIAS_AND_NORM`. They match anywhere in `variable.path`,
            with and without the model's name. Defaults to `None`.
        exclude_from_layer_adaptation: Patterns, as in
            `exclude_from_weight_decay`. None excludes the variables that are
            excluded from weight decay, and `[]` excludes no variable. Defaults
            to `None`.
        lower_bound: float >= 0 or None. Lower bound of phi.
            Defaults to `None`.
        upper_bound: float > 0 or None. Upper bound of phi.
            Defaults to `None`.
        **kwargs: `clipnorm`, `use_ema`, `loss_scale_factor`, ...; see
            `keras.optimizers.Optimizer`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range.

    Example:
        >>> import tf_optimizers as tfo
        >>> optimizer = tfo.Lamb(
        ...     1e-2, exclude_from_weight_decay=tfo.BIAS_AND_NORM
        ... )

    Reference:
        You et al., 2020, "Large Batch Optimization for Deep Learning: Training
        BERT in 76 minutes", arXiv:1904.00962, Algorithm 2.
    """

    def _kernel(self) -> Callable:
        return lamb_step

    def _direction(self) -> Callable:
        return lamb


def lamb_step(
    gpu: bool,
    hyperparameters: LayerwiseHyperparameters,
    handles: Sequence[tf.Tensor],
    gradient: tf.Tensor,
    learning_rate: tf.Tensor,
    step: tf.Tensor,
) -> None:
    """Update w, m and v in place, inside an XLA kernel.

    If the variable has a trust ratio, u is computed twice: once for its norm,
    and once for the update. Storing u would take longer.

    Args:
        gpu: Whether the kernel runs on a GPU.
        hyperparameters: The hyperparameters of the variable.
        handles: The handles of the variables w, m and v.
        gradient: Dense, of the variables' shape and dtype.
        learning_rate: Scalar of the variables' dtype.
        step: int scalar, counted from 1.
    """
    w, m, v = (read(handle, gradient) for handle in handles)
    m, v = update_moments(hyperparameters.betas, gradient, m, v)
    corrections = corrections_at(hyperparameters.betas, step, w.dtype)

    def vectors(w: tf.Tensor, m: tf.Tensor, v: tf.Tensor) -> list[tf.Tensor]:
        return [w, lamb(hyperparameters, w, m, v, corrections)]

    rate = learning_rate
    if hyperparameters.is_adapted:
        ratio = trust_ratio(hyperparameters, *norms(vectors, w, m, v, gpu=gpu))
        rate *= tf.cast(ratio, rate.dtype)
    u = lamb(hyperparameters, w, m, v, corrections)
    for handle, value in zip(handles, (w - rate * u, m, v), strict=True):
        assign(handle, value)


def lamb(
    hyperparameters: LayerwiseHyperparameters,
    weight: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    corrections: Corrections,
) -> tf.Tensor:
    """Return u of the formula in `Lamb`.

    `corrections` correct the bias of m and of sqrt(v).
    """
    # The root of v^ is a product of two roots, because v^ can overflow.
    root = tf.sqrt(v) * corrections.root_of_v
    inverse = 1.0 / (root + scalar(hyperparameters.epsilon, root))
    decay = scalar(hyperparameters.weight_decay, weight) * weight
    return m * corrections.m * inverse + decay
