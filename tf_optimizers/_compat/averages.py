"""Moving averages where Keras's private code expects them."""

from typing import Any, TypeVar

import keras
import tensorflow as tf

from tf_optimizers._compat.keras import built_variables, strategy_of

_Class = TypeVar("_Class", bound=type)


def shares_averages(optimizer_class: _Class) -> _Class:
    """Decorate optimizers whose averages are plain variables of the process.

    `keras.callbacks.SwapEMAWeights` takes the averages from a private
    attribute and has the strategy update them, which asserts that they have a
    component per replica and lets every replica assign to its own.
    """

    def shown(optimizer: Any) -> list[Any]:
        pairs = zip(
            built_variables(optimizer), optimizer._averages, strict=True
        )
        return [_shown(optimizer, *pair) for pair in pairs]

    def keep(optimizer: Any, averages: list[Any]) -> None:
        optimizer._averages = averages

    owner: Any = optimizer_class
    owner._model_variables_moving_average = property(shown, keep)
    return optimizer_class


def show_averages(optimizer: Any, inner: Any) -> None:
    """Let `SwapEMAWeights` find an optimizer's averages on the one it wraps.

    The callback takes every `inner_optimizer` for that of a
    `LossScaleOptimizer`, which has the averages.
    """
    if not hasattr(type(inner), "_model_variables_moving_average"):
        # Not `setattr`: Keras tracks what is assigned to an optimizer.
        object.__setattr__(
            inner,
            "_model_variables_moving_average",
            optimizer._model_variables_moving_average,
        )


def _shown(optimizer: Any, variable: Any, average: Any) -> Any:
    """Return an average with a component for each of its variable's."""
    if isinstance(variable, keras.Variable):
        variable = variable.value
    if average is None or not isinstance(
        variable, tf.distribute.DistributedValues
    ):
        return average
    # Imported here, since without a strategy nobody needs the module.
    from tensorflow.python.distribute import values

    return values.MirroredVariable(
        strategy_of(optimizer),
        [_Share(average.value, i == 0) for i in range(len(variable.values))],
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
