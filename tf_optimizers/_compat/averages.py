"""Moving averages of the host, for what Keras does with them in private."""

from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.keras import (
    OptimizerHooks,
    average,
    built_variables,
    strategy_of,
)


class SharedAverages(OptimizerHooks):
    """An optimizer whose moving averages are plain variables of the process.

    `keras.callbacks.SwapEMAWeights` takes the averages from a private
    attribute and has the strategy update them, which asserts that they have a
    component per replica and lets every replica assign to its own.
    """

    @property
    def _model_variables_moving_average(self) -> list[Any]:
        return list(map(self._shared_average, built_variables(self)))

    @_model_variables_moving_average.setter
    def _model_variables_moving_average(self, averages: list[Any]) -> None:
        self._averages = averages

    def _shared_average(self, variable: Any) -> Any:
        own = average(self, variable)
        if isinstance(variable, keras.Variable):
            variable = variable.value
        if own is None or not isinstance(
            variable, tf.distribute.DistributedValues
        ):
            return own
        # Here, for those without a strategy to do without the module.
        from tensorflow.python.distribute import values

        return values.MirroredVariable(
            strategy_of(self),
            [_Share(own, i == 0) for i in range(len(variable.values))],
            tf.VariableAggregation.NONE,
        )


class _Share:
    """A variable of the process, as one replica sees it: the first assigns."""

    def __init__(self, variable: tf.Variable, is_first: bool) -> None:
        self._variable = variable
        self._is_first = is_first
        self.device, self.dtype = variable.device, variable.dtype
        self.name, self.shape = variable.name, variable.shape

    def assign(self, value: tf.Tensor, **kwargs: Any) -> None:
        if self._is_first:
            self._variable.assign(value, **kwargs)

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._variable, dtype, name=name)
