"""Accumulates the momentum u of each replica from its own gradients.

A regularizer is a gradient, too, which is added there. With the rate in the
momentum, u and v are changes of weights, without it sums of gradients; saved
state of one kind is not read as the other.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.keras import (
    VARIABLES,
    add_replica_variable,
    is_overwritten,
)
from tf_optimizers.base.gradients import as_dense, clip, clip_factor
from tf_optimizers.base.precision import state_dtype
from tf_optimizers.base.replicas import own_component
from tf_optimizers.compression.residual import Increment
from tf_optimizers.kernels import assign, compiled, norm, read, scaled


class Penalty(NamedTuple):
    """The penalty l1 sum |w| + l2 sum w^2; equal ones share a kernel."""

    l1: float
    l2: float


class MomentumHyperparameters(NamedTuple):
    """The constants of a variable's u; equal ones share kernels."""

    momentum: float
    nesterov: bool
    penalty: Penalty | None
    replicas: int


class Momentum(NamedTuple):
    """u of one variable.

    `formula(hyperparameters, weight, gradient, u, rate)` returns the new u, and
    what it adds to v.
    """

    formula: Callable[..., tuple[tf.Tensor, tf.Tensor]]
    hyperparameters: MomentumHyperparameters
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
            several = self.hyperparameters.replicas // self.devices
            limit = self.clipnorm / math.sqrt(several)
            scale *= clip_factor(norm(gradient), limit)
        return Increment(
            _add_scaled,
            (self.formula, self.hyperparameters),
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
        add = compiled(_add_mean, dense, self.formula, self.hyperparameters)
        u = own_component(self.u)
        with tf.device(u.device):
            return add(weight.handle, u.handle, dense, _factor(rate))


def add_momentum(
    optimizer: Any, variable: Any, formula: Callable, penalty: Penalty | None
) -> None:
    """Create u of a variable, and v if it may be compressed.

    Args:
        optimizer: A `DGCMomentum`.
        variable: One that it is built with.
        formula: See `Momentum`.
        penalty: Of variables without a regularizer of their own, which is part
            of the loss already.
    """
    if is_overwritten(optimizer, variable):
        return
    compressor, masking = optimizer._compressor, optimizer.momentum_masking
    dtype = state_dtype(variable.dtype)
    u = add_replica_variable(optimizer, variable, "momentum", dtype)
    if optimizer.rate_in_momentum:
        u.meaning = f"{MARK}=True"  # For backups.
    is_regularized = getattr(variable, "regularizer", None) is not None
    hyperparameters = MomentumHyperparameters(
        optimizer.momentum,
        optimizer.nesterov,
        None if is_regularized else penalty,
        compressor.wire.replicas,
    )
    momentum = Momentum(
        *(formula, hyperparameters, optimizer.clipnorm, masking),
        *(compressor.wire.devices, u),
    )
    # What is not masked goes on when all is dense.
    compressor.add(optimizer, variable, momentum, None if masking else u)


def _add_scaled(
    formula: Callable,
    hyperparameters: MomentumHyperparameters,
    residual: tf.Tensor,
    weight: tf.Tensor,
    momentum: tf.Tensor,
    gradient: tf.Tensor,
    scale: tf.Tensor,
    rate: tf.Tensor,
) -> tf.Tensor:
    gradient = scaled(gradient, scale)
    constants = formula, hyperparameters
    return residual + _add(*constants, weight, momentum, gradient, rate)


def _add_mean(
    formula: Callable,
    hyperparameters: MomentumHyperparameters,
    weight: tf.Tensor,
    momentum: tf.Tensor,
    total: tf.Tensor,
    rate: tf.Tensor,
) -> tf.Tensor:
    mean, replicas = total / hyperparameters.replicas, hyperparameters.replicas
    constants = formula, hyperparameters
    return replicas * _add(*constants, weight, momentum, mean, rate)


def _add(
    formula: Callable,
    hyperparameters: MomentumHyperparameters,
    weight: tf.Tensor,
    momentum: tf.Tensor,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> tf.Tensor:
    """Add a replica's gradient to u; return what that adds to v."""
    w = read(weight, gradient) if hyperparameters.penalty else None
    u = read(momentum, gradient)
    u, change = formula(hyperparameters, w, gradient, u, rate)
    assign(momentum, u)
    return change


def _factor(rate: tf.Tensor | None) -> tf.Tensor:
    """Return what gradients are multiplied by."""
    return tf.constant(1.0) if rate is None else tf.convert_to_tensor(rate)


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
_NAMES = {False: VARIABLES, True: "variables_with_rate"}


class SavedRule:
    """Tells saved state of one rule from that of the other.

    Args:
        rate_in_momentum: The rule.
    """

    def __init__(self, rate_in_momentum: bool) -> None:
        self._here = rate_in_momentum
        self.name = _NAMES[rate_in_momentum]

    def _check(self, there: bool) -> None:
        if self._here != there:
            raise ValueError(
                "`rate_in_momentum` must be what the state was saved with. "
                f"Received: {MARK}={self._here}, and the state of an optimizer "
                f"with {MARK}={there}. Pass `{MARK}={there}`, or load the "
                "weights alone."
            )

    def check_name(self, name: str) -> None:
        """Refuse what a checkpoint of the other rule calls the variables."""
        for there, of_rule in _NAMES.items():
            if name == of_rule:
                self._check(there)

    def mark(self, store: Any) -> None:
        """Say in a store of Keras that the rate is in the momentum, if so."""
        if self._here:
            store[MARK] = np.array(True)

    def unmarked(self, store: Any) -> dict[str, Any]:
        """Return the variables of a store of Keras, if it is of this rule."""
        names = list(store.keys())
        self._check(MARK in names)
        return {name: store[name] for name in names if name != MARK}
