"""Creates a strategy's variables, in any dtype; lets `float` accept them."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers.workers._compat.distribution import (
    CollectiveAllReduceExtended,
)
from tf_optimizers.workers.collectives.bits import (
    from_numbers,
    longest_in,
    strings_to_words,
    to_numbers,
    words_to_strings,
)


class _Number:
    """Makes `float`, `int` and `complex` accept a variable of a strategy."""

    numpy: Callable[[], Any]

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())


@functools.cache
def _number_class(kind: Any) -> Any:
    """Return a subclass of both `_Number` and a variable's class."""
    return type(kind.__name__, (_Number, kind), {"__module__": __name__})


class VariablesExtended(CollectiveAllReduceExtended):
    """Gives each variable the first worker's initial value on all workers."""

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        # TensorFlow takes the class of a variable from a fixed table. So change
        # the class of the new object.
        kind: Any = type(variable)
        if isinstance(variable, tf.distribute.DistributedValues):
            variable.__class__ = _number_class(kind)
        return variable

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Any:
        # TensorFlow can broadcast values of only a few dtypes, so
        # `_of_first_worker` encodes values of other dtypes.
        own = replica_id, device, primary_var
        method = super()._get_variable_creator_initial_value
        make = functools.partial(method, *own)
        if replica_id > 0 or self._num_workers == 1:
            return make(**kwargs)
        return _of_first_worker(make, device, kwargs)


def _of_first_worker(
    make: Callable[..., Any], device: str, arguments: dict[str, Any]
) -> Callable[[], tf.Tensor]:
    """Return a function that returns the first worker's initial value.

    `make`, TensorFlow's method that returns such a function, supports only a
    few dtypes. `arguments` are its keyword arguments, with this worker's
    `initial_value` and `dtype`.
    """

    def broadcast(value: tf.Tensor) -> tf.Tensor:
        own = {"initial_value": value, "dtype": value.dtype}
        return make(**(arguments | own))()

    def initial_value() -> tf.Tensor:
        with tf.device(device):
            value = arguments["initial_value"]
            value = value() if callable(value) else value
            # If a checkpoint is restored before the variable is created, the
            # value is wrapped.
            value = getattr(value, "wrapped_value", value)
            value = tf.convert_to_tensor(value, arguments.get("dtype"))
            if value.shape.num_elements() == 0:
                # TensorFlow crashes in a broadcast without elements, so send
                # one element instead. Its higher rank makes the broadcast fail
                # if another worker's value has elements.
                broadcast(tf.zeros((value.shape.rank + 1) * [1]))
                return value
            if value.dtype != tf.string:
                return from_numbers(broadcast(to_numbers(value)), value.dtype)
            lengths = broadcast(tf.strings.length(value))
            words = broadcast(strings_to_words(value, longest_in(lengths)))
            return words_to_strings(words, lengths)

    return initial_value
