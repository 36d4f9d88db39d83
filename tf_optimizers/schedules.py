"""The learning-rate schedule of the LANS paper."""

from typing import Any

import keras
import tensorflow as tf

from tf_optimizers.base.precision import state_dtype
from tf_optimizers.checks import (
    check_integer,
    check_non_negative,
    check_positive,
)


@keras.saving.register_keras_serializable(package="tf_optimizers")
class LansSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up, constant rate and decay, as in the LANS paper.

    For update t, counted from 1 (Keras passes `step` = t - 1):

        t <= warmup_steps:          learning_rate t / warmup_steps
        then for constant_steps:    learning_rate
        then for decay_steps:       end_learning_rate
                                    + (learning_rate - end_learning_rate)
                                      (1 - (t - warmup_steps - constant_steps)
                                           / decay_steps)
                                      ^ power
        after that:                 end_learning_rate

    With the optimizers of this package, t counts updates of the weights, even
    if `gradient_accumulation_steps` batches make one update. Keras's own
    optimizers count batches, even inside `tfo.ShardedState`, but not inside
    `tfo.SparseLoCo`. If an optimizer counts batches, multiply `warmup_steps`,
    `constant_steps` and `decay_steps` by `gradient_accumulation_steps`.

    The constant part is the paper's idea: the curvature of the loss limits the
    rate, so larger batches need the highest rate for longer, not a higher rate.

    Args:
        learning_rate: float > 0. The highest rate, used in the constant part.
        warmup_steps: int >= 0. Number of updates in the warm-up.
        constant_steps: int >= 0. Number of updates at the highest rate.
        decay_steps: int >= 1. Number of updates in the decay.
        end_learning_rate: float >= 0. The rate after the decay.
            Defaults to `0.0`.
        power: float > 0. The exponent of the decay; 1 is linear, as in the
            paper. Defaults to `1.0`.
        name: str or None. The schedule's name. Defaults to `None`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range.

    Example:
        >>> import tf_optimizers as tfo
        >>> schedule = tfo.schedules.LansSchedule(
        ...     7e-3, warmup_steps=1500, constant_steps=960, decay_steps=1059
        ... )
        >>> optimizer = tfo.LANS(schedule)

    Reference:
        Zheng et al., 2020, "Accelerated Large Batch Optimization of BERT
        Pretraining in 54 minutes", arXiv:2006.13484, Section 3.3.
    """

    # With this attribute, our optimizers pass the number of updates, not of
    # batches.
    counts_updates = True

    def __init__(
        self,
        learning_rate: float,
        warmup_steps: int,
        constant_steps: int,
        decay_steps: int,
        end_learning_rate: float = 0.0,
        power: float = 1.0,
        name: str | None = None,
    ) -> None:
        self.learning_rate = check_positive("learning_rate", learning_rate)
        self.warmup_steps = check_integer("warmup_steps", warmup_steps, 0)
        self.constant_steps = check_integer("constant_steps", constant_steps, 0)
        self.decay_steps = check_integer("decay_steps", decay_steps, 1)
        self.end_learning_rate = check_non_negative(
            "end_learning_rate", end_learning_rate
        )
        self.power = check_positive("power", power)
        self.name = name

    def __call__(self, step: Any) -> tf.Tensor:
        """Return the learning rate for update `step + 1`, as a scalar."""
        # Half precision cannot count steps: float16 skips integers above 2,048,
        # and bfloat16 above 256.
        dtype = state_dtype(keras.backend.floatx())
        update = tf.cast(step, dtype) + 1.0
        end = self.warmup_steps + self.constant_steps + self.decay_steps
        # Subtract first: in float32, the difference of integers below 2^24 is
        # exact.
        left = (end - update) / self.decay_steps
        span = self.learning_rate - self.end_learning_rate
        decayed = self.end_learning_rate + span * tf.pow(
            tf.clip_by_value(left, 0.0, 1.0), self.power
        )
        warming = self.learning_rate * update / max(self.warmup_steps, 1)
        return tf.where(update <= self.warmup_steps, warming, decayed)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
            "constant_steps": self.constant_steps,
            "decay_steps": self.decay_steps,
            "end_learning_rate": self.end_learning_rate,
            "power": self.power,
            "name": self.name,
        }
