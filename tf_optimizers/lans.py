"""LANS: LAMB with normalized gradients and Nesterov's momentum."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers.base.gradients import clip_elements
from tf_optimizers.checks import TINY, check_positive
from tf_optimizers.kernels import (
    assign,
    norms,
    read,
    scalar,
    scaling,
    update_moments,
)
from tf_optimizers.lamb import lamb
from tf_optimizers.layerwise.layerwise_optimizer import LayerwiseOptimizer
from tf_optimizers.layerwise.layerwise_step import (
    Corrections,
    LayerwiseHyperparameters,
    corrections_at,
    trust_ratio,
)


@keras.saving.register_keras_serializable(package="tf_optimizers")
class LANS(LayerwiseOptimizer):
    """LANS: LAMB with normalized gradients and Nesterov's momentum.

    For variable w with gradient g at step t, counted from 1:

        g~ <- g / |g|, each element clipped to +-clip_normalized_gradient
        m <- beta_1 m + (1 - beta_1) g~
        v <- beta_2 v + (1 - beta_2) g~^2
        d <- sqrt(v^) + epsilon
        a <- m^ / d + weight_decay w
        c <- g~ / d + weight_decay w
        w <- w - learning_rate (beta_1 (phi(|w|) / |a|) a
                                + (1 - beta_1) (phi(|w|) / |c|) c)

    m^ = m / (1 - beta_1^t), v^ = v / (1 - beta_2^t); |x| is the L2 norm of the
    whole variable; phi clamps to [lower_bound, upper_bound]; g~ is 0 if |g| is
    less than 1.2e-38. Each trust ratio, phi(|w|) / |a| or phi(|w|) / |c|, is 1
    if its numerator or denominator is 0, and for variables that are excluded
    from layer adaptation.

    The scale of a gradient cancels out. So `clipnorm` and `global_clipnorm`
    have no effect, and `loss_scale_factor` matters only for overflow and
    underflow.

    State: m and v, each with the shape of w: together 8 bytes per parameter in
    float32, or 16 in float64 if w is float64. Float16 and bfloat16 variables
    also get float32 master weights, 4 bytes more.
    Traffic: the strategy's all-reduce of the gradients.
    Sparse gradients: made dense after the exchange, or before it with
    `gradient_accumulation_steps` or `loss_scale_factor`; duplicate rows are
    summed. The update is dense.
    NaN and inf: a NaN or inf in the gradient makes the variable not finite.
    Differs from the paper: g~ can be clipped; phi can have bounds; norms of 0
    are handled as described above.
    Differs from `mxnet.optimizer.LANS`: if all elements of g are 0, g~ is 0,
    while MXNet's weights and state become NaN; the squares of gradients such as
    1e-25 and 1e20 neither underflow nor overflow. Otherwise, the step is that
    of MXNet's fused implementation.

    Args:
        learning_rate: float >= 0, `LearningRateSchedule`, or callable without
            arguments. Defaults to `1e-3`.
        beta_1: float in [0, 1). Decay of m, per step, and the weight of
            direction a in the update. Defaults to `0.9`.
        beta_2: float in [0, 1). Decay of v, per step. Defaults to `0.999`.
        epsilon: float > 0. Added to sqrt(v^). Defaults to `1e-6`.
        weight_decay: float >= 0. Applied inside both trust ratios; None means
            0. Defaults to `0.0`.
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
        clip_normalized_gradient: float > 0 or None. Largest absolute value of
            an element of g~. Defaults to `None`.
        **kwargs: `clipnorm`, `use_ema`, `loss_scale_factor`, ...; see
            `keras.optimizers.Optimizer`.

    Raises:
        TypeError: If an argument has the wrong type.
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

    def _hyperparameters(self, index: int) -> LayerwiseHyperparameters:
        limit = self.clip_normalized_gradient
        return super()._hyperparameters(index)._replace(gradient_limit=limit)

    def _kernel(self) -> Callable:
        return lans_step

    def _direction(self) -> Callable:
        return lamb  # Direction a needs no g~.


def lans_step(
    gpu: bool,
    hyperparameters: LayerwiseHyperparameters,
    handles: Sequence[tf.Tensor],
    gradient: tf.Tensor,
    learning_rate: tf.Tensor,
    step: tf.Tensor,
) -> None:
    """Update w, m and v in place; see `lamb_step` for the arguments."""
    w, m, v = (read(handle, gradient) for handle in handles)
    # Computing both norms together takes hardly any longer than one.
    g_norm, w_norm = norms(lambda *both: both, gradient, w, gpu=gpu)
    normalize = normalized(g_norm, hyperparameters.gradient_limit)
    betas = hyperparameters.betas
    m, v = update_moments(betas, normalize(gradient), m, v)
    corrections = corrections_at(betas, step, w.dtype)

    def directions(*state: tf.Tensor) -> list[tf.Tensor]:
        w, gradient, m, v = state
        return lans(hyperparameters, w, normalize(gradient), m, v, corrections)

    rates = [learning_rate, learning_rate]
    if hyperparameters.is_adapted:
        measured = norms(directions, w, gradient, m, v, gpu=gpu)
        ratios = [trust_ratio(hyperparameters, w_norm, d) for d in measured]
        rates = [learning_rate * tf.cast(ratio, w.dtype) for ratio in ratios]
    a, c = directions(w, gradient, m, v)
    new = w - rates[0] * scalar(betas.of_m, w) * a
    new -= rates[1] * scalar(betas.new_m, w) * c
    for handle, value in zip(handles, (new, m, v), strict=True):
        assign(handle, value)


def normalized(
    norm: tf.Tensor, limit: float | tf.Tensor | None = None
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that divides a gradient, or a block of it, by `norm`.

    With a limit, the function also clips elements to [-limit, limit]. If the
    norm is less than `TINY`, the function returns 0.
    """
    # In float32, the inverse of a subnormal norm can overflow. NaN is not less
    # than `TINY`, so a NaN norm gives NaN.
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
    """Return the directions a and c of the formula in `LANS`.

    `gradient` is g~. `corrections` correct the bias of m and of sqrt(v).
    """
    a = lamb(hyperparameters, weight, m, v, corrections)
    # In direction c, g~ replaces m^, and needs no bias correction.
    corrections = corrections._replace(m=1.0)
    return [a, lamb(hyperparameters, weight, gradient, v, corrections)]
