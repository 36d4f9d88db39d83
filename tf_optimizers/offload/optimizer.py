"""State and step on the host, once per worker process."""

from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.keras import (
    accumulator,
    built_variables,
    is_overwritten,
    micro_steps,
)
from tf_optimizers._compat.replicas import call_across_replicas
from tf_optimizers.base.clipping import clip
from tf_optimizers.base.gradients import in_state_dtype
from tf_optimizers.base.precision import is_half
from tf_optimizers.base.replicas import backend_variable, components
from tf_optimizers.offload.host import (
    HOST,
    HostGradient,
    check_not_compiled,
    is_host,
    on_host,
)
from tf_optimizers.offload.weights import HostKeeper


class HostOptimizer(HostKeeper):
    """An optimizer that steps on the host, once per worker process.

    A step flows

        gradients, summed over replicas ─> host: accumulate ─ clip ─ step
        ─> every replica's weights ─> host: average

    with the last layer first, whose gradient is the first to be known.

    Args:
        *args: See `DecayedOptimizer`.
        **kwargs: See `DecayedOptimizer`.
    """

    def _step_size(
        self, learning_rate: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """Return the scalar that `_step_on_host` is given in this step."""
        raise NotImplementedError

    def _step_on_host(
        self, gradient: tf.Tensor, variable: tf.Variable, size: tf.Tensor
    ) -> tf.Tensor | None:
        """Update the state of a variable, and the variable if it is here.

        Args:
            gradient: Dense, of the variable's shape and its state's dtype.
            variable: A variable that the optimizer was built with.
            size: What `_step_size` returned for this step.

        Returns:
            None if `is_on_host`; the new value of a half-precision variable;
            what to subtract from any other.
        """
        raise NotImplementedError

    def _is_on_host(self, variable: tf.Variable) -> bool:
        """Tell whether the step can be made on the variable itself."""
        copies = components(variable)
        return (
            len(copies) == 1
            and is_host(copies[0].device)
            and not is_half(variable.dtype)
        )

    def _cast(
        self, gradients: list[Gradient | None], variables: list[Any]
    ) -> list[Any]:
        """Send the gradients to the host, unless replicas exchange them."""
        check_not_compiled(type(self).__name__, variables)
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            return super()._cast(gradients, variables)
        return [
            gradient
            if gradient is None or is_overwritten(self, variable)
            else self._send(gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def _accumulate(self, gradients: list[Any], variables: list[Any]) -> None:
        """Sum the gradients over replicas, and make one step of the sum."""
        variables = [backend_variable(variable) for variable in variables]
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            gradients = tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM, gradients
            )
        else:
            gradients = [gradient.tensor for gradient in gradients]

        def apply(strategy: Any, gradients: list[Gradient]) -> None:
            del strategy
            if self.gradient_accumulation_steps:
                self._accumulate_on_host(gradients, variables)
            else:
                changes = self._once_per_worker(
                    "step",
                    lambda: self._changes(
                        _hosted(gradients, variables), variables
                    ),
                )
                self._finish(changes, variables)

        call_across_replicas(apply, gradients)

    def _send(self, gradient: Gradient, variable: Any) -> HostGradient:
        gradient = on_host(gradient, variable)
        with tf.device(HOST):
            return HostGradient(*in_state_dtype([gradient], [variable]))

    def _accumulate_on_host(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> None:
        """Add to the accumulators or, now and then, update the variables."""
        steps = self.gradient_accumulation_steps
        is_update = (micro_steps(self) + 1) % steps == 0
        totals = [accumulator(self, variable) for variable in variables]

        def work() -> list[tf.Tensor]:
            hosted = _hosted(gradients, variables)
            pairs = list(zip(totals, hosted, strict=True))

            def update() -> list[tf.Tensor]:
                with tf.device(HOST):
                    means = [(total + new) / steps for total, new in pairs]
                changes = self._changes(means, variables)
                with tf.device(HOST):
                    for variable in built_variables(self):
                        total = accumulator(self, variable)
                        total.assign(tf.zeros_like(total))
                return changes

            def accumulate() -> list[tf.Tensor]:
                with tf.device(HOST):
                    for total, new in pairs:
                        total.assign_add(new)
                    # Of the dtypes that an update returns, and of no size.
                    return [
                        tf.zeros([0], variable.dtype)
                        for variable in self._not_on_host(variables)
                    ]

            # The branches do not inherit the device, but what they take from
            # outside passes through it.
            with tf.device(HOST):
                return tf.cond(is_update, update, accumulate)

        # Replicas get the tensors before they enter a graph of their own.
        changes = self._once_per_worker("step", work)
        with tf.device(HOST):
            tf.cond(
                is_update,
                lambda: self._finish(changes, variables),
                lambda: None,
            )

    def _changes(
        self, gradients: list[tf.Tensor], variables: list[tf.Variable]
    ) -> list[tf.Tensor]:
        """Step on the host; return what the variables elsewhere need of it."""
        # Read where they are, which need not be the host.
        rate = keras.ops.convert_to_tensor(self.learning_rate)
        step = tf.convert_to_tensor(self.iterations) + 1
        with tf.device(HOST):
            gradients = clip(
                gradients, self.clipnorm, self.global_clipnorm, self.clipvalue
            )
            sizes = {
                dtype: self._step_size(
                    tf.cast(rate, dtype), tf.cast(step, dtype)
                )
                for dtype in {gradient.dtype for gradient in gradients}
            }
            pairs = zip(gradients, variables, strict=True)
            changes = [
                self._step_on_host(gradient, variable, sizes[gradient.dtype])
                for gradient, variable in reversed(list(pairs))
            ]
        return [change for change in changes if change is not None]

    def _finish(
        self, changes: list[tf.Tensor], variables: list[tf.Variable]
    ) -> None:
        """Send the changes to every replica, and let the averages follow."""
        extended = tf.distribute.get_strategy().extended
        for variable, change in zip(
            self._not_on_host(variables), changes, strict=True
        ):
            extended.update(variable, _store, args=(change,), group=False)
        if self.use_ema:
            self._average()

    def _not_on_host(self, variables: list[tf.Variable]) -> list[tf.Variable]:
        """Return those that changes are sent to, in the order of the step."""
        return [v for v in reversed(variables) if not self._is_on_host(v)]


def _hosted(
    gradients: list[Gradient], variables: list[tf.Variable]
) -> list[tf.Tensor]:
    return [
        on_host(gradient, variable)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _store(variable: tf.Variable, change: tf.Tensor) -> None:
    # A `tf.cond` may have lost the shape.
    change = tf.ensure_shape(change, variable.shape)
    if is_half(variable.dtype):
        variable.assign(change)
    else:
        variable.assign_sub(change)
