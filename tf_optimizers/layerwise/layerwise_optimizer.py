"""The base class of `Lamb` and `LANS`."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.keras_internals import variable_index
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
    Fixed,
    check_decay_rate,
    check_epsilon,
    check_non_negative,
    check_patterns,
    check_positive,
)
from tf_optimizers.kernels import betas, compiled, on_gpu
from tf_optimizers.layerwise.layerwise_step import (
    LayerwiseHyperparameters,
    step_each,
    trust_ratio_from_moments,
)

# One launch of a GPU kernel updates at most `LAUNCH_VARIABLES` variables, with
# at most `LAUNCH_ELEMENTS` elements in all. A larger variable is updated alone.
# Higher limits would save little time, and more gradients would be in memory at
# once.
LAUNCH_VARIABLES = 32
LAUNCH_ELEMENTS = 1 << 24

# A variable's component on a device, its gradient, and the learning rate.
Row = tuple[tf.Variable, tf.Tensor, Any]


class LayerwiseOptimizer(Optimizer):
    """Adam whose updates are scaled by the norm of each variable.

    `Lamb` documents the arguments and their defaults.
    """

    exclude_from_layer_adaptation = Fixed()

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float | None = 0.01,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        **kwargs: Any,
    ) -> None:
        exclusions = check_exclusions(exclude_from_weight_decay, kwargs)
        weight_decay = check_weight_decay(weight_decay)
        super().__init__(learning_rate, weight_decay=weight_decay, **kwargs)
        self._exclusions = exclusions
        self.beta_1 = check_decay_rate("beta_1", beta_1)
        self.beta_2 = check_decay_rate("beta_2", beta_2)
        self.epsilon = check_epsilon("epsilon", epsilon)
        self.exclude_from_layer_adaptation = check_patterns(
            "exclude_from_layer_adaptation", exclude_from_layer_adaptation
        )
        self.lower_bound, self.upper_bound = _check_bounds(
            lower_bound, upper_bound
        )

    def build(self, variables: Sequence[Any]) -> None:
        """Create the moments m and v of each variable."""
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )

    def _patterns(self) -> dict[str, Sequence[str] | None]:
        return {LAYER_ADAPTATION: self.exclude_from_layer_adaptation}

    def _is_adapted(self, index: int) -> bool:
        """Return whether the variable at `index` has a trust ratio."""
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

    def _kernel(self) -> Callable:
        """Return the function that updates a variable, such as `lamb_step`."""
        raise NotImplementedError

    def _direction(self) -> Callable:
        """Return the function that computes the direction u, such as `lamb`."""
        raise NotImplementedError

    def _hyperparameters(self, index: int) -> LayerwiseHyperparameters:
        return LayerwiseHyperparameters(
            betas(self.beta_1, self.beta_2),
            self.epsilon,
            self._decay_of(index),
            self._is_adapted(index),
            self.lower_bound,
            self.upper_bound,
        )

    def _step_at(
        self,
        learning_rate: tf.Tensor,
        gradients: list[Gradient],
        variables: list[tf.Variable],
    ) -> None:
        # If a subclass overrides `update_step`, call it for each component.
        if self.update_step != self._update_step:
            super()._step_at(learning_rate, gradients, variables)
            return
        rates = [learning_rate] * len(variables)
        update_by_device(variables, self._step_on_device, gradients, rates)
        self._ema.update()

    def _step_on_device(self, rows: list[Row]) -> None:
        """Update the variables on one device.

        On a GPU, one kernel may update several variables of the same shape,
        unless XLA compiles the whole step.
        """
        groups = [[row] for row in rows]
        if on_gpu() and not in_xla():
            indices = [variable_index(self, row[0]) for row in rows]
            kernels = [
                (v.shape, state_dtype(v.dtype), self._hyperparameters(i))
                for i, (v, *_) in zip(indices, rows, strict=True)
            ]
            groups = [[rows[i] for i in g] for g in launches(indices, kernels)]
        step = self._steps() + 1
        for group in groups:
            self._step_together(group, step)

    def update_step(
        self, gradient: tf.Tensor, variable: Any, learning_rate: Any
    ) -> None:
        """Update one variable, or its component on this device.

        Args:
            gradient: Dense, of the variable's shape and its state's dtype.
            variable: A variable that the optimizer was built with.
            learning_rate: Scalar.
        """
        row = backend_variable(variable), gradient, learning_rate
        self._step_together([row], self._steps() + 1)

    _update_step = update_step

    def _steps(self) -> tf.Tensor:
        # Adding to a Keras variable takes longer to trace than adding to a
        # tensor.
        return tf.convert_to_tensor(self.iterations)

    def _step_together(self, rows: list[Row], step: tf.Tensor) -> None:
        """Update variables, or their components, in one kernel."""
        variables, gradients, (rate, *_) = map(list, zip(*rows, strict=True))
        indices = [variable_index(self, v) for v in variables]
        weights = list(map(self._full_precision, variables))
        handles = [
            (
                weight.handle,
                local_component(self._momentums[i], variable).handle,
                local_component(self._velocities[i], variable).handle,
            )
            for i, variable, weight in zip(
                indices, variables, weights, strict=True
            )
        ]
        like, hyperparameters = weights[0], self._hyperparameters(indices[0])
        kernel = self._kernel(), on_gpu(), hyperparameters
        compiled(step_each, like, len(rows), *kernel)(
            handles, gradients, tf.cast(rate, like.dtype), step
        )
        for variable, weight in zip(variables, weights, strict=True):
            self._store_weight(variable, weight)


def launches(
    variables: Sequence[int],
    kernels: Sequence[tuple[Any, ...]],
) -> list[list[int]]:
    """Return the positions in `variables`, grouped by launch of a GPU kernel.

    A launch takes as long as the update of a few million parameters, so small
    variables share a launch. Variables in a launch have the same key, so that a
    model needs few kernels. If a variable occurs several times, each
    occurrence is in a later launch than the previous one.

    Args:
        variables: The index of each variable.
        kernels: For each variable, the key of its kernel: a tuple that begins
            with the variable's shape.
    """
    groups: dict[Any, list[int]] = {}
    times: collections.Counter = collections.Counter()
    for i, (variable, kernel) in enumerate(
        zip(variables, kernels, strict=True)
    ):
        groups.setdefault((kernel, times[variable]), []).append(i)
        times[variable] += 1
    found = []
    for (kernel, _), positions in groups.items():
        size = max(1, kernel[0].num_elements())
        count = max(1, min(LAUNCH_VARIABLES, LAUNCH_ELEMENTS // size))
        found += [
            positions[i : i + count] for i in range(0, len(positions), count)
        ]
    return found


def last_trust_ratio(
    optimizer: LayerwiseOptimizer, variable: Any, weight: tf.Tensor
) -> tf.Tensor:
    """Return a variable's trust ratio in the last step.

    Args:
        optimizer: A built optimizer.
        variable: A variable that the step has updated.
        weight: The variable's value before that step, in its state's dtype.

    Returns:
        A scalar, phi(|weight|) / |u|, where phi clamps to the optimizer's
        bounds, and u is the direction of the step (in `LANS`, direction a). The
        ratio is 1 if phi(|weight|) or |u| is 0, or if the variable is excluded
        from layer adaptation.
    """
    index = variable_index(optimizer, variable)
    if not optimizer._is_adapted(index):
        return tf.ones([], weight.dtype)
    constants = on_gpu(), optimizer._direction()
    ratio = compiled(
        trust_ratio_from_moments,
        weight,
        *constants,
        optimizer._hyperparameters(index),
    )
    return ratio(
        weight,
        tf.convert_to_tensor(optimizer._momentums[index]),
        tf.convert_to_tensor(optimizer._velocities[index]),
        optimizer._steps(),
    )


def weight_of(optimizer: LayerwiseOptimizer, variable: Any) -> tf.Tensor:
    """Return a variable's value in full precision."""
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
            f"lower_bound={lower}, upper_bound={upper}. Lower `lower_bound`, "
            "or raise `upper_bound`."
        )
    return lower, upper
