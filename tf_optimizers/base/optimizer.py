"""What every optimizer here does with a gradient before its own mathematics."""

from collections.abc import Iterable, Sequence
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
from tf_optimizers._compat.loss_scaling import agree_on_overflow
from tf_optimizers._compat.replicas import switch_across_replicas
from tf_optimizers.base.clipping import clip
from tf_optimizers.base.gradients import (
    as_gradient,
    check_gradients,
    check_not_empty,
    check_replica_context,
    densify,
    in_state_dtype,
)
from tf_optimizers.base.precision import check_floating, state_dtype
from tf_optimizers.base.replicas import backend_variable, update_each
from tf_optimizers.base.weights import WeightKeeper
from tf_optimizers.checks import check_base_arguments, check_learning_rate
from tf_optimizers.distribute.same_optimizer import check_same_optimizer


class Optimizer(WeightKeeper):
    """A Keras optimizer that clips, averages and rounds where it should.

    A replica's gradients flow through `apply` in this order:

        check ─ cast to the state's dtype ─ unscale ─ accumulate ─ sum over
        replicas ─ make dense ─ clip ─ `update_step` ─ average ─ constrain

    Clipping follows the sum, so that N replicas compute what one replica
    computes on the same global batch. The state of float16 and bfloat16
    variables is float32, and so are the master weights they get.

    Args:
        learning_rate: float >= 0 (also an int, NumPy scalar or 0-d tensor),
            `LearningRateSchedule`, or callable without arguments.
        **kwargs: See `keras.optimizers.Optimizer`.
    """

    def __init__(self, learning_rate: Any, **kwargs: Any) -> None:
        check_base_arguments(kwargs)
        super().__init__(
            learning_rate=check_learning_rate(learning_rate), **kwargs
        )
        self._is_agreed = False

    def build(self, variables: Sequence[Any]) -> None:
        """Create what every optimizer keeps of `variables`."""
        if self.built:
            return
        for variable in variables:
            if not is_overwritten(self, variable):
                check_floating(variable)
        agree_on_overflow()
        super().build(variables)
        self._add_master_weights(variables)

    def add_variable(
        self,
        shape: Any,
        initializer: Any = "zeros",
        dtype: Any = None,
        **kwargs: Any,
    ) -> keras.Variable:
        """Add a variable, in float32 where the model's is of half precision."""
        if dtype is not None:
            dtype = state_dtype(dtype)
        return super().add_variable(
            shape, initializer=initializer, dtype=dtype, **kwargs
        )

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient, Any]]
    ) -> keras.Variable:
        """Apply (gradient, variable) pairs; see `apply`."""
        pairs = list(grads_and_vars)
        check_not_empty(pairs)
        return super().apply_gradients(pairs)

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[Any] | None = None,
    ) -> None:
        """Update the variables from one gradient each, in replica context.

        Args:
            grads: Tensors or `tf.IndexedSlices` of the variables' shapes, or
                None for a variable that the loss does not depend on.
            trainable_variables: The variables, of which the first call's are
                those that the optimizer is built with. Defaults to these.

        Raises:
            ValueError: If there is no gradient, or one of another shape than
                its variable, or an unknown variable. Nothing has changed then.
            TypeError: If a gradient is not of a floating dtype.
            RuntimeError: If called outside of `strategy.run`.
        """
        grads = [as_gradient(gradient) for gradient in grads]
        check_not_empty(grads)
        check_replica_context()
        if trainable_variables is None and self.built:
            trainable_variables = built_variables(self)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            check_gradients(grads, trainable_variables)
            grads = self._cast(grads, trainable_variables)
            if not self.built:
                # Lifted out of a `tf.function` that is being traced: inside,
                # replicas get variables that are never initialized.
                with tf.init_scope():
                    self.build(trainable_variables)
            if not self._is_agreed:
                check_same_optimizer(self, trainable_variables)
                self._is_agreed = True
        super().apply(grads, trainable_variables)

    def _cast(
        self, gradients: list[Gradient | None], variables: list[Any]
    ) -> list[Any]:
        """Return gradients of the state's dtype that can be unscaled."""
        gradients = in_state_dtype(gradients, variables)
        if self.loss_scale_factor or self.gradient_accumulation_steps:
            # Keras can neither divide nor add IndexedSlices.
            gradients = densify(gradients, variables)
        return gradients

    def _accumulate(
        self, gradients: list[Gradient], variables: list[Any]
    ) -> None:
        """Accumulate this replica's gradients, or update the variables."""
        steps = self.gradient_accumulation_steps
        if not steps:
            self._update(gradients, variables)
            return
        accumulators = [accumulator(self, variable) for variable in variables]

        def accumulate(gradients: list[tf.Tensor]) -> None:
            update_each(
                accumulators,
                lambda total, gradient: total.assign_add(gradient),
                gradients,
            )

        def update(gradients: list[tf.Tensor]) -> None:
            means = [
                (total + gradient) / steps
                for gradient, total in zip(gradients, accumulators, strict=True)
            ]
            self._update(means, variables)
            update_each(
                [accumulator(self, v) for v in built_variables(self)],
                lambda total: total.assign(tf.zeros_like(total)),
            )

        switch_across_replicas(
            (micro_steps(self) + 1) % steps == 0,
            [accumulate, update],
            gradients,
        )

    def _update(self, gradients: list[Gradient], variables: list[Any]) -> None:
        """Update the variables from this replica's share of the gradients."""
        variables = [backend_variable(variable) for variable in variables]
        self._step(self._exchange(gradients, variables), variables)

    def _exchange(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> list[Gradient]:
        """Sum the gradients over replicas, make them dense and clip them."""
        gradients = tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, gradients
        )
        return clip(
            densify(gradients, variables),
            self.clipnorm,
            self.global_clipnorm,
            self.clipvalue,
        )

    def _step(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> None:
        """Call `update_step` for each variable and each of its components."""
        learning_rate = keras.ops.convert_to_tensor(self.learning_rate)
        update_each(
            variables,
            lambda variable, gradient, rate: self.update_step(
                gradient, variable, rate
            ),
            gradients,
            [learning_rate] * len(variables),
        )
        if self.use_ema:
            self._average()
