"""Accumulates momentum u, every replica of its own gradients.

A regularizer is a gradient, too, which is added there. With the rate in the
momentum, u and v are changes of weights, without it sums of gradients; saved
state of one kind is not read as the other.
"""

import math
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.keras import VARIABLES
from tf_optimizers.base.gradients import as_dense, clip, clip_factor
from tf_optimizers.base.replicas import own_component
from tf_optimizers.compression.residual import Increment
from tf_optimizers.kernels.compiled import assign, compiled, read
from tf_optimizers.kernels.norms import norm, scaled


class Penalty(NamedTuple):
    """The penalty l1 sum |w| + l2 sum w^2; equal ones share a kernel."""

    l1: float
    l2: float


class Rule(NamedTuple):
    """How u is accumulated; equal ones share kernels."""

    decay: float
    nesterov: bool
    penalty: Penalty | None
    replicas: int


class Momentum(NamedTuple):
    """u of one variable."""

    rule: Rule
    clipnorm: float | None
    masking: bool  # Whether u becomes 0 where v is sent.
    devices: int  # How many of the replicas share u and v.
    u: keras.Variable  # Of the shape of w; every replica has its own.

    def increment(
        self, gradient: tf.Tensor, weight: tf.Variable, rate: tf.Tensor | None
    ) -> Increment:
        """Return what adds a gradient, of all who share u, to u, and u to v.

        Times the rate, if there is one.
        """
        u = own_component(self.u).handle
        scale = tf.constant(1 / self.devices, tf.float64)
        if self.clipnorm:
            # So many gradients of this norm, at right angles, have a sum of
            # the norm `clipnorm`.
            several = self.rule.replicas // self.devices
            limit = self.clipnorm / math.sqrt(several)
            scale *= clip_factor(norm(gradient), limit)
        return Increment(
            _add_scaled,
            (self.rule,),
            (weight.handle, u, gradient, scale, _factor(rate)),
            masked=(u,) if self.masking else (),
        )

    def update(
        self, total: Gradient, weight: tf.Variable, rate: tf.Tensor | None
    ) -> tf.Tensor:
        """Add a share of the summed gradient to u; return the update of all.

        All replicas do the same, so that their u are equal, and N times what
        one adds is what all of them would send.
        """
        dense = as_dense(total, weight)
        (dense,) = clip([dense], self.clipnorm, None, None)
        add = compiled(_add_mean, dense, self.rule)
        u = own_component(self.u).handle
        return add(weight.handle, u, dense, _factor(rate))


def _add_scaled(
    rule: Rule,
    weight: tf.Tensor,
    momentum: tf.Tensor,
    gradient: tf.Tensor,
    scale: tf.Tensor,
    rate: tf.Tensor,
) -> tf.Tensor:
    return _add(rule, weight, momentum, scaled(gradient, scale), rate)


def _add_mean(
    rule: Rule,
    weight: tf.Tensor,
    momentum: tf.Tensor,
    total: tf.Tensor,
    rate: tf.Tensor,
) -> tf.Tensor:
    mean = total / rule.replicas
    return rule.replicas * _add(rule, weight, momentum, mean, rate)


def _factor(rate: tf.Tensor | None) -> tf.Tensor:
    """Return what gradients are multiplied by."""
    return tf.constant(1.0) if rate is None else tf.convert_to_tensor(rate)


def _add(
    rule: Rule,
    weight: tf.Tensor,
    momentum: tf.Tensor,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> tf.Tensor:
    """Add a replica's gradient to u; return what that adds to v."""
    if rule.penalty is not None:
        l1, l2 = rule.penalty
        w = read(weight, gradient)
        gradient += (l1 * tf.sign(w) + 2 * l2 * w) / rule.replicas
    gradient *= tf.cast(rate, gradient.dtype)
    u = read(momentum, gradient)
    if rule.nesterov:
        u = rule.decay * (u + gradient)
    else:
        u = rule.decay * u + gradient
    assign(momentum, u)
    return u + gradient if rule.nesterov else u


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


MARK = "rate_in_momentum"
# What checkpoints call the variables, with the rate in the momentum.
CHECKPOINT_NAMES = {False: VARIABLES, True: "variables_with_rate"}


def check_saved(here: bool, there: bool) -> None:
    """Refuse state that was saved by the other rule."""
    if here != there:
        raise ValueError(
            "`rate_in_momentum` must be what the state was saved with. "
            f"Received: {MARK}={here}, and the state of an optimizer with "
            f"{MARK}={there}. Pass `{MARK}={there}`, or load the weights alone."
        )


def write_mark(store: Any) -> None:
    """Say in a store of Keras that the rate is in the momentum."""
    store[MARK] = np.array(True)


def without_mark(store: Any, here: bool) -> dict[str, Any]:
    """Return the variables of a store of Keras that is of this rule."""
    names = list(store.keys())
    check_saved(here, MARK in names)
    return {name: store[name] for name in names if name != MARK}
