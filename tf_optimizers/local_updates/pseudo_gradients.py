"""Runs the inner optimizer on each replica, by its own gradients."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.strategies import replaced
from tf_optimizers._compat.tensorflow_internals import replica_variables_on
from tf_optimizers.base.components import own_component
from tf_optimizers.base.inner import InnerSteps
from tf_optimizers.compression.compressor import Compressor
from tf_optimizers.offload.host import HOST
from tf_optimizers.offload.host_optimizer import HostOptimizer
from tf_optimizers.wrapped import wrapped_optimizers


class LocalSteps(InnerSteps):
    """Runs an inner optimizer on each replica separately.

    Each replica has its own state of the optimizer. Read outside of replicas,
    the state is their mean; a value assigned there is assigned to all.
    """

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

    def place(self) -> contextlib.AbstractContextManager:
        """Return a scope for temporaries that are as large as weights."""
        return (
            tf.device(HOST) if self._is_hosted() else contextlib.nullcontext()
        )

    def _is_hosted(self) -> bool:
        """Tell whether the optimizer's state is on the host."""
        return any(
            isinstance(part, HostOptimizer)
            for part in wrapped_optimizers(self._optimizer)
        )

    def step(
        self,
        gradients: Sequence[tf.Tensor],
        weights: Sequence[tf.Variable],
        indices: Sequence[int],
        updates: tf.Tensor,
    ) -> None:
        """Update this replica's weights.

        Args:
            gradients: This replica's, dense.
            weights: This replica's components of the variables.
            indices: Positions of the variables among all.
            updates: How many there were before; the optimizer's `iterations`.
        """
        for part in wrapped_optimizers(self._optimizer):
            own_component(part.iterations).assign(updates)
        self.step_on_replica(gradients, weights, indices)


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
