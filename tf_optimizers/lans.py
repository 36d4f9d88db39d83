"""LANS: LAMB with normalized gradients and Nesterov's momentum."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers.base.gradients import clip_elements
from tf_optimizers.checks import TINY, check_positive
from tf_optimizers.kernels import scalar, scaling
from tf_optimizers.layerwise.layerwise_optimizer import LayerwiseOptimizer
from tf_optimizers.layerwise.layerwise_step import (
    Corrections,
    LayerwiseHyperparameters,
    Rule,
)


@keras.saving.register_keras_serializable(package="tf_optimizers")
class LANS(LayerwiseOptimizer):
    """LANS: LAMB with normalized gradients and Nesterov's momentum.

    For variable w with gradient g at step t, counted from 1:

        g~ <- g / |g|, elementwise in [-clip_normalized_gradient, +...]
        m <- beta_1 m + (1 - beta_1) g~
        v <- beta_2 v + (1 - beta_2) g~^2
        d <- sqrt(v^) + epsilon
        a <- m^ / d + weight_decay w
        c <- g~ / d + weight_decay w
        w <- w - learning_rate (beta_1 (phi(|w|) / |a|) a
                                + (1 - beta_1) (phi(|w|) / |c|) c)

    m^ = m / (1 - beta_1^t), v^ = v / (1 - beta_2^t); |x| is the L2 norm of the
    whole variable; phi clamps to [lower_bound, upper_bound]; g~ is 0 where |g|
    is 0. Both trust ratios phi(|w|) / |.| are 1 when a part is 0, and for
    variables that are excluded from layer adaptation.

    The scale of a gradient cancels out, so `clipnorm` and `loss_scale_factor`
    only change what is representable.

    State: m and v of the shape of w in float32 (float64 for float64 w), 8
    bytes per parameter; float16 and bfloat16 variables also get float32 master
    weights, 4 bytes more.
    Traffic: as the strategy's all-reduce of the gradients.
    Sparse gradients: made dense after the exchange; duplicate rows are summed
    first. The update is dense.
    Not finite: a NaN or inf gradient makes the variable not finite.
    Differs from the paper: only in clipping and bounds.
    Differs from `mxnet.optimizer.LANS`: an all-zero gradient leaves g~ at 0
    instead of turning weights and state into NaN; tiny and huge gradients
    neither underflow nor overflow. Other steps equal its fused ones.

    Args:
        learning_rate: float >= 0, `LearningRateSchedule`, or callable without
            arguments. Defaults to `1e-3`.
        beta_1: float in [0, 1). Decay of m, per step, and the weight of its
            direction. Defaults to `0.9`.
        beta_2: float in [0, 1). Decay of v, per step. Defaults to `0.999`.
        epsilon: float > 0. Added to the root of v^. Defaults to `1e-6`.
        weight_decay: float >= 0. Inside both trust ratios; None means 0.
            Defaults to `0.0`.
        exclude_from_weight_decay: None or a sequence of regular expressions,
            searched in `variable.path`, with and without the model's name,
            such as `tfo.BIAS_AND_NORM`.
            Defaults to `None`.
        exclude_from_layer_adaptation: The same. None excludes the variables
            that are not decayed, `[]` excludes nothing.
            Defaults to `None`.
        lower_bound: float >= 0 or None. Least |w| in the ratios.
            Defaults to `None`.
        upper_bound: float > 0 or None. Greatest |w| in the ratios.
            Defaults to `None`.
        clip_normalized_gradient: float > 0 or None. Greatest absolute element
            of g~. Defaults to `None`.
        **kwargs: `clipnorm`, `use_ema`, `loss_scale_factor`, ...; see
            `keras.optimizers.Optimizer`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is outside its range.

    Example:
        >>> import tf_optimizers as tfo
        >>> optimizer = tfo.LANS(
        ...     tfo.schedules.LansSchedule(7e-3, 1500, 960, 1059),
        ...     weight_decay=0.01,
        ...     exclude_from_weight_decay=tfo.BIAS_AND_NORM,
        ... )

    Reference:
        Zheng et al., 2020, "Accelerated Large Batch Optimization of BERT
        Pretraining in 54 minutes", arXiv:2006.13484, Algorithm 2.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float | None = 0.0,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        clip_normalized_gradient: float | None = None,
        **kwargs: Any,
    ) -> None:
        if clip_normalized_gradient is not None:
            clip_normalized_gradient = check_positive(
                "clip_normalized_gradient", clip_normalized_gradient
            )
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
        self.clip_normalized_gradient = clip_normalized_gradient

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return super().get_config() | {
            "clip_normalized_gradient": self.clip_normalized_gradient
        }

    def _rule(self) -> Rule:
        return Rule(
            lans,
            shares=(self.beta_1, 1 - self.beta_1),
            prepare=normalized,
            limit=self.clip_normalized_gradient,
        )


def normalized(
    norm: tf.Tensor, limit: float | tf.Tensor | None = None
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return what divides a gradient by its norm, then clips it; see `Rule`.

    If the norm is 0, so is the result.
    """
    # A norm below the normal numbers has no finite inverse. NaN stays NaN.
    inverse = tf.where(norm < TINY, tf.zeros_like(norm), 1.0 / norm)
    scale = scaling(inverse)
    if limit is None:
        return scale
    return lambda gradient: clip_elements(
        scale(gradient), scalar(limit, gradient)
    )


def lans(
    hyperparameters: LayerwiseHyperparameters,
    weight: tf.Tensor,
    gradient: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    corrections: Corrections,
) -> list[tf.Tensor]:
    """Return a and c of the formula; `gradient` is g~, and m and v are new."""
    # Two roots, since the quotient can overflow where they do not.
    root = tf.sqrt(v) * corrections.root_of_v
    inverse = 1.0 / (root + scalar(hyperparameters.epsilon, root))
    decay = scalar(hyperparameters.weight_decay, weight) * weight
    return [m * corrections.m * inverse + decay, gradient * inverse + decay]
