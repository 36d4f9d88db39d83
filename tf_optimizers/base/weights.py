"""The weights besides the model's: in full precision, and averaged."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.keras import (
    OptimizerHooks,
    average,
    built_variables,
    is_overwritten,
    strategy_of,
    variable_index,
)
from tf_optimizers.base.precision import is_half, refresh_master_weight
from tf_optimizers.base.replicas import (
    backend_variable,
    local_component,
    update_each,
)


class WeightKeeper(OptimizerHooks):
    """Keeps master weights and moving averages.

    A half-precision variable has a float32 master weight, of which it is the
    rounding. A moving average follows the master weight, if there is one.
    """

    def _add_master_weights(self, variables: Sequence[Any]) -> None:
        """Create those of `variables`."""
        self._master_weights = [
            self._add_master_weight(variable) for variable in variables
        ]

    def _full_precision(self, variable: tf.Variable) -> tf.Variable:
        """Return `variable`, or its up-to-date float32 master weight.

        What is assigned to the result reaches a half-precision variable with
        `store_weight`.
        """
        master = self._master_weight(variable)
        if master is None:
            return variable
        master = local_component(master, variable)
        refresh_master_weight(master, variable)
        return master

    def _master_weight(self, variable: Any) -> tf.Variable | None:
        """Return the master weight of a half-precision variable."""
        master = self._master_weights[variable_index(self, variable)]
        return None if master is None else master.value

    def _store_weight(self, variable: tf.Variable, weight: tf.Variable) -> None:
        """Round the master weight into its variable, if it is one."""
        if weight is not variable:
            variable.assign(tf.cast(weight, variable.dtype))

    def _overwrite_with_averages(self, variables: list[Any]) -> None:
        """Assign to each variable its moving average."""
        # Keras calls this after training, outside of the strategy's scope.
        with strategy_of(self).scope():
            for variable in map(backend_variable, variables):
                if (value := average(self, variable)) is not None:
                    strategy_of(self).extended.update(
                        variable, self._assign_weight, args=(value,)
                    )

    def _average(self) -> None:
        """Let the moving averages follow the weights, and replace them."""
        variables = [
            backend_variable(variable)
            for variable in built_variables(self)
            if not is_overwritten(self, variable)
        ]
        update_each(variables, self._update_average)

    def _update_average(self, variable: tf.Variable) -> None:
        weight = self._full_precision(variable)
        mean = local_component(average(self, variable), variable)
        self._follow(mean, weight)
        if self.ema_overwrite_frequency:
            tf.cond(
                (self.iterations + 1) % self.ema_overwrite_frequency == 0,
                lambda: self._assign_weight(variable, mean),
                lambda: None,
            )

    def _follow(self, average: tf.Variable, weight: tf.Variable) -> None:
        """Let a moving average follow its weight by one update."""
        # The first update sets the average to the weights themselves.
        is_later = tf.cast(self.iterations > 0, average.dtype)
        momentum = self.ema_momentum * is_later
        average.assign(momentum * average + (1 - momentum) * weight)

    def _assign_weight(self, variable: tf.Variable, value: Any) -> None:
        weight = self._full_precision(variable)
        weight.assign(tf.cast(value, weight.dtype))
        self._store_weight(variable, weight)

    def _add_master_weight(self, variable: Any) -> keras.Variable | None:
        if is_overwritten(self, variable) or not is_half(variable.dtype):
            return None
        return self.add_variable_from_reference(
            variable,
            name="master_weight",
            initializer=lambda shape, dtype: tf.cast(variable, dtype),
        )
