"""Passes moving averages of weights to `keras.callbacks.SwapEMAWeights`."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.keras_internals import strategy_of

_AVERAGES = "_model_variables_moving_average"


def show_averages(optimizer: Any, inner: Any) -> None:
    """Make an inner optimizer return the averages of its outer `optimizer`.

    If an optimizer has an `inner_optimizer`, as `LossScaleOptimizer` does,
    `SwapEMAWeights` reads the averages there.
    """
    # Do not use `setattr`: Keras would track the value.
    object.__setattr__(inner, _AVERAGES, _AveragesOf(optimizer))


class _AveragesOf:
    """An iterable over an optimizer's current averages."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __iter__(self) -> Iterator[Any]:
        return iter(self._optimizer._model_variables_moving_average)


class InnerAverages:
    """Passes the averages of an inner optimizer to `SwapEMAWeights`.

    In a `LossScaleOptimizer` or a `MultiOptimizer`, the callback reads the
    averages of the optimizers inside, but not of optimizers that these wrap. So
    a wrapper such as `ShardedState` returns its inner optimizer's averages.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def note(self, gradients: Any, variables: Any) -> None:
        """Do nothing, since the inner optimizer updates the averages."""

    def shown(self) -> Any:
        """Return the inner optimizer's averages."""
        return getattr(self._inner, _AVERAGES)


class WholeAverages:
    """Passes sharded averages to `SwapEMAWeights` as whole averages.

    The callback needs whole averages on every replica. Iterating over this
    object gathers only one average at a time.
    """

    def __init__(self, optimizer: Any) -> None:
        # Optimizers of this package store their averages in `_averages`, and
        # may return other averages from Keras's attribute.
        own = "_averages" if hasattr(optimizer, "_averages") else _AVERAGES
        self._averages = getattr(optimizer, own)
        self._strategy = strategy_of(optimizer)
        # Do not use `setattr`: Keras would track the value.
        object.__setattr__(optimizer, _AVERAGES, self)

    def __getitem__(self, index: int) -> Any:
        return self._averages[index]

    def __iter__(self) -> Iterator[Any]:
        from tensorflow.python.distribute import values

        for average in self._averages:
            whole = tf.convert_to_tensor(average.numpy())
            copies = self._strategy.experimental_local_results(average.value)
            yield values.MirroredVariable(
                self._strategy,
                [_Whole(copy, whole) for copy in copies],
                tf.VariableAggregation.NONE,
            )


class _Whole:
    """Wraps a replica's rows of an average; its value is the whole average."""

    def __init__(self, variable: tf.Variable, value: tf.Tensor) -> None:
        self._variable = variable
        self._value = value
        # `SwapEMAWeights` and the strategy read these attributes.
        self.device, self.dtype = variable.device, variable.dtype
        self.name, self.shape = variable.name, variable.shape

    def assign(self, value: tf.Tensor, **kwargs: Any) -> None:
        self._value = tf.convert_to_tensor(value)
        self._variable.assign(value, **kwargs)

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._value, dtype, name=name)
