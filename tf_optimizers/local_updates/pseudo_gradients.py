"""Measures how far each replica's inner optimizer moves the weights."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_optimizers._compat.keras import built_variables
from tf_optimizers._compat.replicas import replica_variables_on
from tf_optimizers._compat.strategies import (
    named_like,
    outside_strategy,
    replaced,
    unconstrained,
)
from tf_optimizers.base.replicas import own_component
from tf_optimizers.compression.compressor import Compressor
from tf_optimizers.compression.residual import Increment
from tf_optimizers.distribute.optimizers import parts_of
from tf_optimizers.offload.host import HOST
from tf_optimizers.offload.optimizer import HostOptimizer


class LocalSteps:
    """Runs an inner optimizer on each replica separately.

    Each replica has its own state of the optimizer. Read outside of replicas,
    the state is their mean; a value assigned there is assigned to all.

    Args:
        optimizer: The inner optimizer.
        variables: The variables it updates: the model's or, for half-precision
            ones, their master weights.
        likes: The model's variables, whose names and paths it is shown.
    """

    def __init__(
        self, optimizer: Any, variables: Sequence[Any], likes: Sequence[Any]
    ) -> None:
        self._optimizer = optimizer
        self._variables = list(variables)
        self._names = [
            attribute
            for variable, like in zip(variables, likes, strict=True)
            if variable is not like
            for attribute in named_like(variable, like)
        ]

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create the optimizer's state on every replica."""
        with replaced(self._names), _own_state():
            self._optimizer.build(self._variables)
        for variable in self._optimizer.variables:
            # In a replica, `build` has assigned only to the replica's own.
            first, *others = strategy.experimental_local_results(variable.value)
            for other in others:
                other.assign(first)

    def variables_beside_state(self) -> contextlib.AbstractContextManager:
        """Return a scope for variables that are as large as weights."""
        if self._is_hosted():
            return replica_variables_on(HOST)
        return contextlib.nullcontext()

    def _place(self) -> contextlib.AbstractContextManager:
        """Return a scope for temporaries that are as large as weights."""
        return (
            tf.device(HOST) if self._is_hosted() else contextlib.nullcontext()
        )

    def _is_hosted(self) -> bool:
        """Tell whether the optimizer's state is on the host."""
        return any(
            isinstance(part, HostOptimizer)
            for part in parts_of(self._optimizer)
        )

    def step(
        self,
        gradients: Sequence[tf.Tensor],
        weights: Sequence[tf.Variable],
        indices: Sequence[int],
        updates: tf.Tensor,
    ) -> None:
        """Update this replica's weights; the arguments are as below."""
        parts = parts_of(self._optimizer)
        moved = [self._variables[i] for i in indices]
        shown = [
            variable if isinstance(variable, keras.Variable) else weight
            for variable, weight in zip(moved, weights, strict=True)
        ]
        switched_off = unconstrained(shown)
        with self._outside_strategy(moved), replaced(switched_off):
            for part in parts:
                part.iterations.assign(updates)
            for part in parts[1:] or parts:
                # `MultiOptimizer` takes no group without a gradient.
                known = set(map(id, built_variables(part)))
                own = [i for i, v in enumerate(moved) if id(v) in known]
                if own:
                    part.apply(
                        [gradients[i] for i in own], [shown[i] for i in own]
                    )

    def pseudo_gradients(
        self,
        gradients: Sequence[tf.Tensor],
        weights: Sequence[tf.Variable],
        indices: Sequence[int],
        updates: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Return old minus new weights of a step, and restore the weights.

        Constraints are left out: they are applied to the common weights.

        Args:
            gradients: This replica's, dense.
            weights: This replica's components of the variables.
            indices: Positions of the variables among all.
            updates: How many there were before; the optimizer's `iterations`.
        """
        with self._place():
            before = [weight.read_value() for weight in weights]
        self.step(gradients, weights, indices, updates)
        with self._place():
            changes = [
                old - weight.read_value()
                for weight, old in zip(weights, before, strict=True)
            ]
        for weight, old in zip(weights, before, strict=True):
            weight.assign(old)
        return changes

    @contextlib.contextmanager
    def _outside_strategy(self, variables: Sequence[Any]) -> Iterator[None]:
        """Show the optimizer only this replica."""
        moved = [v for v in variables if isinstance(v, keras.Variable)]
        own = [
            (variable, own_component(variable))
            for variable in [*self._optimizer.variables, *moved]
        ]
        with (
            replaced(self._names),
            outside_strategy(parts_of(self._optimizer), own),
        ):
            yield


class PseudoGradient(NamedTuple):
    """What is accumulated and applied of a variable's pseudo-gradients."""

    decay: float  # Multiplies the residual in every step.
    replicas: int
    devices: int  # How many replicas share a residual and step alike.

    def increment(
        self, gradient: tf.Tensor, weight: tf.Variable, rate: tf.Tensor | None
    ) -> Increment:
        """Return what a worker's pseudo-gradient, summed over devices, adds."""
        del weight, rate
        parts = self.devices * self.replicas
        return Increment(_share, (parts,), (gradient,), decay=self.decay)

    def update(
        self, total: tf.Tensor, weight: tf.Variable, rate: tf.Tensor | None
    ) -> tf.Tensor:
        """Return the mean of the pseudo-gradients from their sum."""
        del weight, rate
        return total / self.replicas


def _share(parts: int, total: tf.Tensor) -> tf.Tensor:
    return total / parts


@contextlib.contextmanager
def _own_state() -> Iterator[None]:
    """Create floating-point variables with a separate value per replica."""

    def create(next_creator: Any, **kwargs: Any) -> tf.Variable:
        if tf.as_dtype(kwargs["dtype"]).is_floating:
            kwargs |= {
                "synchronization": tf.VariableSynchronization.ON_READ,
                "aggregation": tf.VariableAggregation.MEAN,
                "trainable": False,
            }
        return next_creator(**kwargs)

    with tf.variable_creator_scope(create):
        yield


def worker_means(
    compressor: Compressor, gradients: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Return the mean gradients of a worker's share of the batch.

    Keras has divided the loss by the number of all replicas.
    """
    wire = compressor.wire
    workers = wire.replicas // wire.devices
    if workers == 1:
        return gradients
    totals = compressor.sum_on_worker(gradients)
    return [workers * total for total in totals]
