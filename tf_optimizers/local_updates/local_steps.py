"""Runs an inner optimizer on each replica separately."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import distinct
from tf_optimizers._compat.strategies import replaced
from tf_optimizers._compat.tensorflow_internals import replica_variables_on
from tf_optimizers.base.components import own_component
from tf_optimizers.base.inner import InnerSteps
from tf_optimizers.offload.host import HOST
from tf_optimizers.offload.host_optimizer import HostOptimizer
from tf_optimizers.wrapped import wrapped_optimizers


class LocalSteps(InnerSteps):
    """Runs an inner optimizer on each replica separately.

    Each replica has its own optimizer state. Outside of `strategy.run`,
    reading the state returns the mean over replicas, and assigning to it
    changes the state on all replicas.
    """

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create the optimizer's state on every replica."""
        with replaced(self._names), _own_state():
            self._optimizer.build(self._variables)
        optimizers = wrapped_optimizers(self._optimizer)
        for variable in distinct(v for o in optimizers for v in o.variables):
            # `build` may have assigned only the first replica's component.
            first, *others = strategy.experimental_local_results(variable.value)
            for other in others:
                other.assign(first)

    def variable_scope(self) -> contextlib.AbstractContextManager:
        """Return a scope that creates variables where the state is."""
        if self._is_hosted():
            return replica_variables_on(HOST)
        return contextlib.nullcontext()

    def tensor_scope(self) -> contextlib.AbstractContextManager:
        """Return a scope that computes tensors where the state is."""
        if self._is_hosted():
            return tf.device(HOST)
        return contextlib.nullcontext()

    def _is_hosted(self) -> bool:
        return any(
            isinstance(each, HostOptimizer)
            for each in wrapped_optimizers(self._optimizer)
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
            gradients: The dense gradients of the variables.
            weights: This replica's components of the variables.
            indices: Positions of the variables among all variables.
            updates: The value to assign to the inner optimizer's `iterations`.
        """
        for each in wrapped_optimizers(self._optimizer):
            own_component(each.iterations).assign(updates)
        self.step_on_replica(gradients, weights, indices)


@contextlib.contextmanager
def _own_state() -> Iterator[None]:
    """Give new floating-point variables a separate value on each replica."""

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
