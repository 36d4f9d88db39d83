"""Regularizers as gradients, added where gradients are accumulated."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf


class Penalty(NamedTuple):
    """The penalty l1 sum |w| + l2 sum w^2; equal ones share a kernel."""

    l1: float
    l2: float

    def gradient(self, weight: tf.Tensor) -> tf.Tensor:
        """Return l1 sign(w) + 2 l2 w."""
        return self.l1 * tf.sign(weight) + 2 * self.l2 * weight


def penalty_of(regularizer: Any) -> Penalty | None:
    """Return the penalty of a regularizer of Keras, None of None."""
    if regularizer is None:
        return None
    # Not of a subclass, which may compute anything.
    if type(regularizer) not in (
        keras.regularizers.L1,
        keras.regularizers.L2,
        keras.regularizers.L1L2,
    ):
        raise TypeError(
            "`regularizer` must be None or an object of "
            "`keras.regularizers.L1`, `L2` or `L1L2`, such as "
            "`keras.regularizers.L2(1e-4)`. Received: "
            f"regularizer={regularizer!r}."
        )
    return Penalty(
        float(getattr(regularizer, "l1", 0.0)),
        float(getattr(regularizer, "l2", 0.0)),
    )
