"""Stores state and gradients in the memory of the host."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.keras_internals import unchanged_in_cond
from tf_optimizers._compat.strategies import is_adopted
from tf_optimizers._compat.tensorflow_internals import (
    in_xla,
    plain_variable,
    temporary_variable,
)
from tf_optimizers.base.components import components
from tf_optimizers.base.gradients import as_dense
from tf_optimizers.base.precision import is_half, state_dtype
from tf_optimizers.kernels import assign, compiled, read
from tf_optimizers.replicas import replicas_of

# TensorFlow adds this worker's job and task to the name.
HOST = "/CPU:0"


class HostGradient:
    """A dense gradient in host memory.

    Keras divides gradients by `loss_scale_factor`. If a gradient were a tensor,
    Keras would divide it on the model's device, and allocate a second gradient
    there.
    """

    def __init__(self, tensor: tf.Tensor) -> None:
        self.tensor = tensor

    def __truediv__(self, scale: float) -> "HostGradient":
        """Return the unscaled gradient, in the dtype of the state."""
        with tf.device(HOST):
            gradient = tf.cast(self.tensor, state_dtype(self.tensor.dtype))
            return HostGradient(gradient / scale)


class OnHost:
    """Stores state on the host, in one copy for all replicas of a worker.

    Under a strategy with merge calls, such as `MirroredStrategy`, one thread
    updates the state. Under other strategies, the replicas run or trace the
    same code one after another. The first replica updates the state, and the
    other replicas use its results.
    """

    def __init__(self) -> None:
        self._results: dict[str, Any] = {}
        # Results that are computed but not sent yet, by id of the variable.
        self.unsent: dict[int, list[tf.Tensor]] = {}

    def scope(self) -> contextlib.AbstractContextManager:
        """Return a context for computations on the state."""
        return tf.device(HOST)

    def update_each(
        self,
        variables: Sequence[tf.Variable],
        function: Callable,
        *args: Sequence[Any],
    ) -> None:
        """Call `function(variable, *values)` for each variable, on the host."""
        with self.scope():
            for variable, *values in zip(variables, *args, strict=True):
                function(variable, *values)

    def shown(self, optimizer: Any) -> Any:
        """Return moving averages for Keras's callbacks.

        Raises:
            ValueError: If `use_ema` is set under a strategy, because the
                callbacks need an average on every replica. Sharded averages are
                accepted.
        """
        is_sharded = not isinstance(optimizer._averages, list)
        if optimizer.use_ema and is_adopted(optimizer) and not is_sharded:
            name = type(optimizer).__name__
            raise ValueError(
                f"`SwapEMAWeights` cannot swap averages of `{name}` under a "
                "strategy, since the averages are on the host. Received: "
                f"{name}(use_ema=True) under a strategy. Use "
                f"`ema_overwrite_frequency`, or `ShardedState({name}(...))` "
                "with several replicas."
            )
        return optimizer._averages

    def once(self, key: str, function: Callable) -> Any:
        """Call `function` once for all replicas of this worker.

        Args:
            key: A name for the call, unique within the step.
            function: Returns tensors, which every replica gets.
        """
        group = replicas_of()
        if tf.distribute.in_cross_replica_context() or group.count == 1:
            return function()
        count = len(group.devices)
        replica = group.rank % count
        if replica == 0:
            self._results[key] = function()
        result = self._results[key]
        if replica == count - 1:
            del self._results[key]  # The tensors would keep the graph alive.
        return result


@contextlib.contextmanager
def variables_on_host() -> Iterator[None]:
    """Create variables once per process, on the host, even under a strategy."""

    def create(
        next_creator: Callable, initial_value: Any = None, **kwargs: Any
    ) -> tf.Variable:

        def value() -> tf.Tensor:
            # TensorFlow calls this function outside of any device scope.
            with tf.device(HOST):
                return initial_value()

        with tf.device(HOST):
            return plain_variable(
                value,
                dtype=kwargs["dtype"],
                name=kwargs["name"],
            )

    with tf.variable_creator_scope(create):
        yield


def is_host(device: str) -> bool:
    """Return whether a device, given by its full name, is the host."""
    spec = tf.DeviceSpec.from_string(device)
    return (spec.device_type, spec.device_index) == ("CPU", 0)


def is_on_host(variable: tf.Variable) -> bool:
    """Return whether a step on the host can update the variable in place."""
    copies = components(variable)
    return (
        len(copies) == 1
        and is_host(copies[0].device)
        and not is_half(variable.dtype)
    )


def on_host(gradient: Gradient, variable: tf.Variable) -> tf.Tensor:
    """Return a gradient's first copy on this worker, dense and on the host."""
    with tf.device(HOST):
        return as_dense(components(gradient)[0], variable)


def in_place(
    kernel: Callable, constants: Any, old: tf.Tensor, *args: tf.Tensor
) -> tf.Tensor:
    """Return `kernel(constants, old, *args)`, in the memory of `old`.

    If `old` was copied from a GPU, its memory is pinned. Copying a result to
    the GPU from other memory takes five times as long.
    """
    # Under XLA, all tensors are on one device, and XLA chooses the memory.
    if in_xla():
        return compiled(kernel, old, constants)(old, *args)
    like = tf.TensorSpec(old.shape, old.dtype)
    replace = compiled(_replace, old, kernel, constants, like)
    buffer = temporary_variable(old)
    replace(buffer, *args)
    return read(buffer, like)


def _replace(
    kernel: Callable,
    constants: Any,
    like: tf.TensorSpec,
    buffer: tf.Tensor,
    *args: tf.Tensor,
) -> None:
    assign(buffer, kernel(constants, read(buffer, like), *args))


def check_not_compiled(name: str, variables: Sequence[Any]) -> None:
    """Raise if XLA compiles the step and a variable is not on the host."""
    if not in_xla():
        return
    for variable in variables:
        for component in components(variable):
            if not is_host(component.device):
                raise unchanged_in_cond(
                    RuntimeError(
                        f"{name} keeps its state on {HOST}, so XLA cannot "
                        "compile a train step for another device. Received: "
                        f"{component.name} on {component.device}. Pass "
                        "`jit_compile=False` to `compile` or, in a custom "
                        "training loop, to `tf.function`."
                    )
                )
