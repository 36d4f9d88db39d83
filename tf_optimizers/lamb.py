"""LAMB: Adam with one trust ratio per variable."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers.kernels import scalar
from tf_optimizers.layerwise.layerwise_optimizer import LayerwiseOptimizer
from tf_optimizers.layerwise.layerwise_step import (
    Corrections,
    LayerwiseHyperparameters,
    Rule,
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
    phi(|w|) / |u| is 1 when phi(|w|) or |u| is 0, and for variables that are
    excluded from layer adaptation.

    State: m and v of the shape of w in float32 (float64 for float64 w), 8
    bytes per parameter; float16 and bfloat16 variables also get float32 master
    weights, 4 bytes more.
    Traffic: as the strategy's all-reduce of the gradients.
    Sparse gradients: made dense after the exchange; duplicate rows are summed
    first. The update is dense.
    Not finite: a NaN or inf gradient makes the variable not finite.
    Differs from the paper: only in the bounds, which define phi.
    Differs from `paddle.optimizer.Lamb`: `weight_decay=0` still adapts, as in
    Paddle up to 2.5; to adapt nothing, pass
    `exclude_from_layer_adaptation=[""]`.
    Differs from `keras.optimizers.Lamb`: weight decay is inside the trust
    ratio; gradients are summed over replicas first, then clipped; float32
    state; the default of `epsilon`.

    Args:
        learning_rate: float >= 0, `LearningRateSchedule`, or callable without
            arguments. Defaults to `1e-3`.
        beta_1: float in [0, 1). Decay of m, per step. Defaults to `0.9`.
        beta_2: float in [0, 1). Decay of v, per step. Defaults to `0.999`.
        epsilon: float > 0. Added to the root of v^. Defaults to `1e-6`.
        weight_decay: float >= 0. Inside the trust ratio; None means 0.
            Defaults to `0.01`.
        exclude_from_weight_decay: None or a sequence of regular expressions,
            searched in `variable.path`, with and without the model's name,
            such as `tfo.BIAS_AND_NORM`.
            Defaults to `None`.
        exclude_from_layer_adaptation: The same. None excludes the variables
            that are not decayed, `[]` excludes nothing.
            Defaults to `None`.
        lower_bound: float >= 0 or None. Least |w| in the ratio.
            Defaults to `None`.
        upper_bound: float > 0 or None. Greatest |w| in the ratio.
            Defaults to `None`.
        **kwargs: `clipnorm`, `use_ema`, `loss_scale_factor`, ...; see
            `keras.optimizers.Optimizer`.

    Raises:
        TypeError: If an argument is of the wrong kind.
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

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float | None = 0.01,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            weight_decay=weight_decay,
            exclude_from_weight_decay=exclude_from_weight_decay,
            exclude_from_layer_adaptation=exclude_from_layer_adaptation,
            lower_bound=lower_bound,
            upper_bound=upper_bound,
            **kwargs,
        )

    def _rule(self) -> Rule:
        return Rule(lamb)


def lamb(
    hyperparameters: LayerwiseHyperparameters,
    weight: tf.Tensor,
    gradient: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    corrections: Corrections,
) -> list[tf.Tensor]:
    """Return u of the formula; m and v are new."""
    del gradient  # It is in m and v.
    # Two roots, since the quotient can overflow where they do not.
    root = tf.sqrt(v) * corrections.root_of_v
    inverse = 1.0 / (root + scalar(hyperparameters.epsilon, root))
    decay = scalar(hyperparameters.weight_decay, weight) * weight
    return [m * corrections.m * inverse + decay]
