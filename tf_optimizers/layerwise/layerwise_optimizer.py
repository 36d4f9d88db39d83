"""Keeps Adam's state, and steps in proportion to |w|, for Lamb and LANS."""

from collections.abc import Hashable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.keras_internals import variable_index
from tf_optimizers._compat.strategies import replaced
from tf_optimizers._compat.tensorflow_internals import in_xla, update_by_device
from tf_optimizers.base.components import backend_variable, local_component
from tf_optimizers.base.exclusions import (
    LAYER_ADAPTATION,
    check_exclusions,
    check_weight_decay,
)
from tf_optimizers.base.optimizer import Optimizer
from tf_optimizers.base.precision import refreshed, state_dtype
from tf_optimizers.checks import (
    check_decay_rate,
    check_epsilon,
    check_non_negative,
    check_patterns,
    check_positive,
)
from tf_optimizers.kernels import betas, compiled, logarithm, on_gpu
from tf_optimizers.layerwise.launches import launches
from tf_optimizers.layerwise.layerwise_step import (
    Corrections,
    LayerwiseHyperparameters,
    Rule,
    corrections_at,
    layerwise_steps,
    momentum_ratio,
)


class LayerwiseOptimizer(Optimizer):
    """Adam's moments, with steps in proportion to the norm of each variable."""

    # In a step, the corrections of the moments' bias of one variable's dtype.
    _present: Corrections | None = None

    def __init__(
        self,
        learning_rate: Any,
        *,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        weight_decay: float | None,
        exclude_from_weight_decay: Sequence[str] | None,
        exclude_from_layer_adaptation: Sequence[str] | None,
        lower_bound: float | None,
        upper_bound: float | None,
        **kwargs: Any,
    ) -> None:
        beta_1 = check_decay_rate("beta_1", beta_1)
        beta_2 = check_decay_rate("beta_2", beta_2)
        epsilon = check_epsilon("epsilon", epsilon)
        lower_bound, upper_bound = _check_bounds(lower_bound, upper_bound)
        patterns = check_patterns(
            "exclude_from_layer_adaptation", exclude_from_layer_adaptation
        )
        exclusions = check_exclusions(exclude_from_weight_decay, kwargs)
        weight_decay = check_weight_decay(weight_decay)
        super().__init__(learning_rate, weight_decay=weight_decay, **kwargs)
        self._exclusions = exclusions
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.exclude_from_layer_adaptation = patterns
        self.lower_bound = lower_bound
        self.upper_bound = upper_bound

    def build(self, variables: Sequence[Any]) -> None:
        """Create m and v for each variable, in its shape, at least float32."""
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )

    def _patterns(self) -> dict[str, Sequence[str] | None]:
        return {LAYER_ADAPTATION: self.exclude_from_layer_adaptation}

    def _is_adapted(self, index: int) -> bool:
        """Return whether the step of the variable gets a trust ratio."""
        if self.exclude_from_layer_adaptation is None:
            return self._is_decayed(index)
        return not self._excluded.has(LAYER_ADAPTATION, index)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        patterns = self.exclude_from_layer_adaptation
        return super().get_config() | {
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            **self._exclusions.config(self._excluded),
            "exclude_from_layer_adaptation": None
            if patterns is None
            else list(patterns),
            "lower_bound": self.lower_bound,
            "upper_bound": self.upper_bound,
        }

    def _rule(self) -> Rule:
        """Return what distinguishes the optimizer's steps from others'."""
        raise NotImplementedError

    def _hyperparameters(self, index: int) -> LayerwiseHyperparameters:
        return LayerwiseHyperparameters(
            betas(self.beta_1, self.beta_2),
            self.epsilon,
            self._decay_of(index),
            lower_bound=self.lower_bound,
            upper_bound=self.upper_bound,
        )

    def _step_at(
        self,
        learning_rate: tf.Tensor,
        gradients: list[Gradient],
        variables: list[tf.Variable],
        *others: list[Any],
    ) -> None:
        dtypes = [state_dtype(variable.dtype) for variable in variables]
        # Once a step, not for every variable, which would all be traced.
        by_dtype = {dtype: self._corrections(dtype) for dtype in set(dtypes)}
        corrections = [by_dtype[dtype] for dtype in dtypes]
        if self._has_own_steps():
            super()._step_at(
                learning_rate, gradients, variables, corrections, *others
            )
            return
        rates = [learning_rate] * len(variables)
        update_by_device(
            variables, self._step_on_device, gradients, rates, corrections
        )
        self._ema.update()

    def _has_own_steps(self) -> bool:
        """Return whether another `update_step` steps, such as a subclass's."""
        ours = LayerwiseOptimizer.update_step
        return getattr(self.update_step, "__func__", None) is not ours

    def _step_on_device(
        self,
        variables: list[tf.Variable],
        gradients: list[tf.Tensor],
        rates: list[tf.Tensor],
        corrections: list[Corrections],
    ) -> None:
        """Step components; on a GPU, those of one shape together."""
        groups = [[i] for i in range(len(variables))]
        if on_gpu() and not in_xla():
            indices = [variable_index(self, v) for v in variables]
            kernels = [
                (v.shape, state_dtype(v.dtype), *self._constants(v))
                for v in variables
            ]
            groups = launches(indices, kernels)
        for group in groups:
            self._step_alike(
                [variables[i] for i in group],
                [gradients[i] for i in group],
                rates[0],
                corrections[group[0]],
            )

    def _corrections(self, dtype: Any, ahead: int = 1) -> Corrections:
        """Return those of the next step, or of the last."""
        # Keras takes longer to trace `iterations + 1`.
        step = tf.cast(self.iterations, dtype) + ahead
        logs = logarithm(self.beta_1), logarithm(self.beta_2)
        return compiled(corrections_at, step, *logs)(step)

    def _step_component(
        self,
        variable: tf.Variable,
        gradient: Gradient,
        rate: tf.Tensor,
        corrections: Corrections | None = None,
    ) -> None:
        # Not an argument: subclasses may override what Keras defines.
        with replaced([(self, "_present", corrections)]):
            super()._step_component(variable, gradient, rate)

    def update_step(
        self, gradient: tf.Tensor, variable: Any, learning_rate: Any
    ) -> None:
        """Update one variable, or its component on this device.

        Args:
            gradient: Dense, of the variable's shape and its state's dtype.
            variable: A variable that the optimizer was built with.
            learning_rate: Scalar.
        """
        variable = backend_variable(variable)
        present = self._present or self._corrections(
            state_dtype(variable.dtype)
        )
        self._step_alike([variable], [gradient], learning_rate, present)

    def _step_alike(
        self,
        variables: list[tf.Variable],
        gradients: list[tf.Tensor],
        learning_rate: Any,
        corrections: Corrections,
    ) -> None:
        """Step variables of one kernel, or their components on this device."""
        weights = list(map(self._full_precision, variables))
        like, constants = weights[0], self._constants(variables[0])
        step = compiled(layerwise_steps, like, len(weights), *constants)
        step(
            [weight.handle for weight in weights],
            [self._slot(self._momentums, v).handle for v in variables],
            [self._slot(self._velocities, v).handle for v in variables],
            gradients,
            tf.cast(learning_rate, like.dtype),
            corrections,
        )
        for variable, weight in zip(variables, weights, strict=True):
            self._store_weight(variable, weight)

    def _constants(self, variable: tf.Variable) -> tuple[Hashable, ...]:
        """Return the constants of the kernel of a variable."""
        index = variable_index(self, variable)
        return (
            *(on_gpu(), self._rule(), self._hyperparameters(index)),
            self._is_adapted(index),
        )

    def _slot(
        self, slots: list[keras.Variable], variable: tf.Variable
    ) -> tf.Variable:
        """Return the slot of a variable, or of its component."""
        return local_component(slots[variable_index(self, variable)], variable)


def trust_ratio(
    optimizer: LayerwiseOptimizer, variable: Any, weight: tf.Tensor
) -> tf.Tensor:
    """Return the trust ratio of a step from `weight` with the present moments.

    Args:
        optimizer: A built optimizer.
        variable: A variable that the optimizer was built with.
        weight: Its value before the last step, in its state's dtype.

    Returns:
        A scalar, phi(|weight|) / |u|; 1 if the variable is not adapted.
    """
    index = variable_index(optimizer, variable)
    if not optimizer._is_adapted(index):
        return tf.ones([], weight.dtype)
    ratio = compiled(
        *(momentum_ratio, weight, on_gpu(), optimizer._rule()),
        optimizer._hyperparameters(index),
    )
    return ratio(
        weight,
        tf.convert_to_tensor(optimizer._momentums[index]),
        tf.convert_to_tensor(optimizer._velocities[index]),
        optimizer._corrections(weight.dtype, ahead=0),
    )


def weight_of(optimizer: LayerwiseOptimizer, variable: Any) -> tf.Tensor:
    """Return a weight in full precision."""
    master = optimizer._masters[variable_index(optimizer, variable)]
    value = tf.convert_to_tensor(backend_variable(variable))
    if master is None:
        return value
    return refreshed(tf.convert_to_tensor(master), value)


def _check_bounds(
    lower: float | None, upper: float | None
) -> tuple[float | None, float | None]:
    if lower is not None:
        lower = check_non_negative("lower_bound", lower)
    if upper is not None:
        upper = check_positive("upper_bound", upper)
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(
            "`lower_bound` must be at most `upper_bound`. Received: "
            f"lower_bound={lower}, upper_bound={upper}."
        )
    return lower, upper
