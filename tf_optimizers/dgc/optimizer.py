"""Steps replicas that exchange entries of their momentum."""

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.keras import (
    add_replica_variable,
    is_overwritten,
    strategy_of,
)
from tf_optimizers.base.optimizer import Optimizer
from tf_optimizers.base.precision import state_dtype
from tf_optimizers.base.replicas import backend_variable, own_component
from tf_optimizers.compression.compressor import Compressor
from tf_optimizers.compression.residual import subtract
from tf_optimizers.dgc.momentum import (
    CHECKPOINT_NAMES,
    MARK,
    Momentum,
    Penalty,
    Rule,
    check_saved,
    without_mark,
    write_mark,
)


class CompressedMomentum(Optimizer):
    """Momentum SGD whose replicas send entries; `DGCMomentum` has settings.

    Their names are those of its arguments.
    """

    momentum: float
    nesterov: bool
    momentum_masking: bool
    rate_in_momentum: bool
    _compressor: Compressor
    _penalty: Penalty | None

    def build(self, variables: Sequence[Any]) -> None:
        """Create u of each variable, and v of those that are compressed."""
        if self.built:
            return
        super().build(variables)
        if strategy_of(self).num_replicas_in_sync == 1:
            warnings.warn(
                "DGCMomentum saves traffic between replicas. Received: one "
                "replica, which has none. Use `keras.optimizers.SGD` with "
                "`momentum` there.",
                stacklevel=2,
            )
        self._variables_name = CHECKPOINT_NAMES[self.rate_in_momentum]
        self._compressor.build(strategy_of(self))
        for variable in variables:
            if not is_overwritten(self, variable):
                self._add_state(variable)

    def _update(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> None:
        """Update the variables by what all send at the stage of this step."""

        def update(sparsity: float | None, gradients: list[Gradient]) -> None:
            weights = [
                self._full_precision(own_component(v)) for v in variables
            ]
            rate = tf.convert_to_tensor(self.learning_rate)
            inside = rate if self.rate_in_momentum else None
            updates = self._compressor.exchange(
                self, sparsity, gradients, variables, weights, inside
            )
            self._step_at(rate, updates, variables)

        gradients = self._compressor.prepare(self, gradients, variables)
        self._compressor.at_stage(self, gradients, update)

    def update_step(
        self, gradient: Gradient, variable: Any, learning_rate: Any
    ) -> None:
        """Subtract what was received from a variable, or its component.

        Args:
            gradient: Dense, or `tf.IndexedSlices` of the flattened variable.
            variable: A variable that the optimizer was built with.
            learning_rate: Scalar. Part of the gradient already, if it is in
                the momentum.
        """
        variable = backend_variable(variable)
        weight = self._full_precision(variable)
        rate = 1.0 if self.rate_in_momentum else learning_rate
        subtract(weight, gradient, tf.cast(rate, weight.dtype))
        self._store_weight(variable, weight)

    def save_own_variables(self, store: Any) -> None:
        """Write all variables, and whether u and v contain the rate."""
        super().save_own_variables(store)
        if self.rate_in_momentum:
            write_mark(store)

    def load_own_variables(self, store: Any) -> None:
        """Read all variables, if u and v contain the rate as here."""
        super().load_own_variables(without_mark(store, self.rate_in_momentum))

    def _check_name(self, name: str) -> None:
        for rule, of_rule in CHECKPOINT_NAMES.items():
            if name == of_rule:
                check_saved(self.rate_in_momentum, rule)

    def _add_state(self, variable: Any) -> None:
        u = add_replica_variable(
            self, variable, "momentum", state_dtype(variable.dtype)
        )
        if self.rate_in_momentum:
            u.meaning = f"{MARK}=True"  # For backups.
        # A regularizer of its own is part of the loss already.
        is_regularized = getattr(variable, "regularizer", None) is not None
        penalty = None if is_regularized else self._penalty
        wire = self._compressor.wire
        rule = Rule(self.momentum, self.nesterov, penalty, wire.replicas)
        momentum = Momentum(
            rule, self.clipnorm, self.momentum_masking, wire.devices, u
        )
        # What is not masked goes on when all is dense.
        shared = None if self.momentum_masking else u
        self._compressor.add(self, variable, momentum, shared)
