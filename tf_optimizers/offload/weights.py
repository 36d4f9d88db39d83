"""Variables, master weights and moving averages on the host."""

from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.averages import SharedAverages
from tf_optimizers._compat.keras import (
    average,
    built_variables,
    is_overwritten,
    strategy_of,
)
from tf_optimizers.base.precision import refreshed
from tf_optimizers.base.replicas import backend_variable
from tf_optimizers.base.weight_decay import DecayedOptimizer
from tf_optimizers.offload.host import (
    HOST,
    OncePerWorker,
    value_of,
    variables_on_host,
)


class HostKeeper(SharedAverages, DecayedOptimizer):
    """An optimizer of which the model's devices hold nothing.

    Every variable of the size of a weight (slots, master weights, moving
    averages, gradient accumulators) is one plain variable per process, on the
    host.

    Args:
        *args: See `DecayedOptimizer`.
        **kwargs: See `DecayedOptimizer`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._once_per_worker = OncePerWorker()

    def add_variable(self, *args: Any, **kwargs: Any) -> keras.Variable:
        """Add a variable to the host."""
        # One for all replicas: what one reads is the whole, no share of it.
        kwargs["aggregation"] = "only_first_replica"
        with variables_on_host():
            return super().add_variable(*args, **kwargs)

    def _overwrite_with_averages(self, variables: list[Any]) -> None:
        """Assign to each variable its moving average."""
        # Keras calls this after training, outside of the strategy's scope.
        with strategy_of(self).scope():
            self._assign_averages(list(map(backend_variable, variables)))

    def _average(self) -> None:
        """Let the moving averages follow the weights, and replace them."""
        variables = [
            backend_variable(variable)
            for variable in built_variables(self)
            if not is_overwritten(self, variable)
        ]

        def follow() -> list[tf.Tensor]:
            for variable in variables:
                weight = self._weight_on_host(variable)
                with tf.device(HOST):
                    self._follow(average(self, variable), weight)
            return []

        self._once_per_worker("average", follow)
        if self.ema_overwrite_frequency:
            tf.cond(
                (self.iterations + 1) % self.ema_overwrite_frequency == 0,
                lambda: self._assign_averages(variables),
                lambda: None,
            )

    def _weight_on_host(self, variable: tf.Variable) -> tf.Tensor:
        value = value_of(variable)
        master = self._master_weight(variable)
        if master is None:
            return value
        with tf.device(HOST):
            master.assign(refreshed(master.value(), value))
            return master.value()

    def _assign_averages(self, variables: list[tf.Variable]) -> None:
        extended = tf.distribute.get_strategy().extended
        for variable in variables:
            mean = average(self, variable)
            if mean is None:
                continue
            with tf.device(HOST):
                value = tf.cast(mean, variable.dtype)
                master = self._master_weight(variable)
                if master is not None:
                    # The variable's value will be its rounding.
                    master.assign(mean)
            extended.update(variable, _assign, args=(value,), group=False)


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    variable.assign(value)
