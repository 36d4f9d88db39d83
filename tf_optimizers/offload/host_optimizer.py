"""Stores state on the host, and runs steps there, once per worker process."""

import contextlib
import functools
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.keras_internals import is_overwritten
from tf_optimizers._compat.owned import own_rows, owns_rows
from tf_optimizers._compat.tensorflow_internals import (
    call_across_replicas,
    in_xla,
    update_each,
)
from tf_optimizers.base.components import (
    Accumulators,
    backend_variable,
    components,
)
from tf_optimizers.base.gradients import clip, in_state_dtype
from tf_optimizers.base.optimizer import Optimizer
from tf_optimizers.base.precision import is_half, state_dtype
from tf_optimizers.offload.host import (
    HOST,
    HostGradient,
    OnHost,
    check_not_compiled,
    is_host,
    is_on_host,
    on_host,
    variables_on_host,
)
from tf_optimizers.replicas import replicas_of
from tf_optimizers.wrapped import every_optimizer

# A variable with at least this many elements is large. If the large variables
# are not on the host, at most `_AT_ONCE` are updated at the same time. So the
# changes of the first variables are sent back while others are updated.
_LARGE = 1 << 18
# This many kernels together use nearly all processors, because XLA runs a
# memory-bound kernel on sqrt(processors) threads (TensorFlow 2.21).
_AT_ONCE = math.isqrt(os.cpu_count() or 1)


class HostOptimizer(Optimizer):
    """An optimizer that runs its steps on the host, once per worker process.

    Every piece of state (slots, master weights, moving averages, gradient
    accumulators) is one plain variable per process, on the host, unless
    `ShardedState` distributes it. One accumulator serves all replicas, so a
    step has these stages:

        `_cast` ─ (Keras: unscale) ─ `_sum`
        ─> host: accumulate ─ clip ─ `update_step`
        ─> every replica's weights ─> host: averages

    The last layer is updated first, because its gradient arrives first.

    A subclass defines `_rate(learning_rate, step)`, which returns the rate for
    `update_step`. If a variable `is_on_host`, `update_step` updates the
    variable and returns None. Otherwise, `update_step` returns the change to
    subtract or, for a half-precision variable, the new value.
    """

    def __init__(self, learning_rate: Any, **kwargs: Any) -> None:
        super().__init__(learning_rate, **kwargs)
        self._placement = OnHost()

    def add_variable(self, *args: Any, **kwargs: Any) -> keras.Variable:
        """Add a variable on the host."""
        # There is only one copy, which must not be summed over replicas.
        kwargs["aggregation"] = "only_first_replica"
        with variables_on_host():
            return super().add_variable(*args, **kwargs)

    def _cast(
        self, gradients: list[Gradient | None], variables: list[Any]
    ) -> list[Any]:
        """Copy gradients to the host, unless replicas must sum them first."""
        check_not_compiled(type(self).__name__, variables)
        if replicas_of().count > 1:
            return super()._cast(gradients, variables)
        return [
            gradient
            if gradient is None or is_overwritten(self, variable)
            else _send(gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def _accumulate(self, gradients: list[Any], variables: list[Any]) -> None:
        """Sum the gradients of all replicas, then accumulate or step."""
        variables = [backend_variable(variable) for variable in variables]
        step = self._step
        if self.gradient_accumulation_steps:
            step = self._accumulate_or_step
        call_across_replicas(
            lambda _, gradients: step(gradients, variables),
            self._sum(gradients),
        )

    def _sum(self, gradients: list[Any]) -> list[Gradient]:
        """Sum the gradients over replicas, without clipping."""
        if replicas_of().count > 1:
            return replicas_of().sum(gradients)
        return [gradient.tensor for gradient in gradients]

    def _step(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> None:
        """Run the step on the host, and send the changes to every replica."""

        def work() -> list[tf.Tensor]:
            hosted = list(map(on_host, gradients, variables))
            return self._changes(hosted, variables)

        self._apply_changes(self._placement.once("step", work), variables)

    def _accumulate_or_step(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> None:
        """Add gradients to the accumulators, or run the step with means."""
        accumulators = Accumulators(self, variables, self._placement)

        def work() -> list[tf.Tensor]:
            hosted = list(map(on_host, gradients, variables))
            hosted = _in_state_dtype(hosted, variables)

            def step() -> list[tf.Tensor]:
                changes = self._changes(accumulators.means(hosted), variables)
                accumulators.clear()
                return changes

            def accumulate() -> list[tf.Tensor]:
                accumulators.add(hosted)
                # Both branches of `tf.cond` must return the same dtypes and,
                # under XLA, the same shapes.
                with tf.device(HOST):
                    return [
                        tf.zeros(v.shape if in_xla() else [0], v.dtype)
                        for v in _not_on_host(variables)
                    ]

            # In a graph, this scope moves the tensors that the branches capture
            # to the host. The ops inside the branches choose their own devices.
            with tf.device(HOST):
                return tf.cond(accumulators.is_full, step, accumulate)

        # Call `once` before this `tf.cond`: inside, each replica has its own
        # graph, which cannot use another replica's tensors.
        changes = self._placement.once("step", work)
        with tf.device(HOST):
            send = functools.partial(self._apply_changes, changes, variables)
            tf.cond(accumulators.is_full, send, lambda: None)

    def _changes(
        self, gradients: list[tf.Tensor], variables: list[tf.Variable]
    ) -> list[tf.Tensor]:
        """Run the step; return the changes that are not applied in place."""
        # Read the learning rate and `iterations` on their own devices.
        rate = tf.convert_to_tensor(self.learning_rate)
        step = tf.convert_to_tensor(self.iterations) + 1
        with tf.device(HOST):
            limits = self.clipnorm, self.global_clipnorm, self.clipvalue
            if any(limits):
                gradients = _in_state_dtype(gradients, variables)
                gradients = clip(gradients, *limits, xla=False)
            rates = {
                dtype: self._rate(tf.cast(rate, dtype), tf.cast(step, dtype))
                for dtype in {state_dtype(v.dtype) for v in variables}
            }
            changes: list[tf.Tensor] = []
            large: list[tf.Tensor] = []
            unsent = self._placement.unsent = {}
            pairs = zip(gradients, variables, strict=True)
            for gradient, variable in reversed(list(pairs)):
                is_large = variable.shape.num_elements() >= _LARGE
                with _after(large if is_large else []):
                    change = self.update_step(
                        gradient, variable, rates[state_dtype(variable.dtype)]
                    )
                if change is None:
                    continue
                changes.append(change)
                unsent.setdefault(id(variable), []).append(change)
                large += [change] * is_large
            unsent.clear()  # The tensors would keep the graph alive.
        return changes

    def _apply_changes(
        self, changes: list[tf.Tensor], variables: list[tf.Variable]
    ) -> None:
        """Send the changes to every replica, then update the averages."""
        update_each(_not_on_host(variables), _store, changes)
        self._ema.update()


def _after(changes: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager:
    """Return a scope in which at most `_AT_ONCE` large updates run at once.

    `changes` are the results of the previous large updates.
    """
    last = len(changes) - _AT_ONCE
    return tf.control_dependencies(
        changes[last : last + 1] if last >= 0 else []
    )


def _send(gradient: Gradient, variable: Any) -> HostGradient:
    gradient = on_host(gradient, variable)
    if gradient.dtype == variable.dtype:
        return HostGradient(gradient)
    return HostGradient(*_in_state_dtype([gradient], [variable]))


def _in_state_dtype(
    gradients: Sequence[tf.Tensor], variables: Sequence[Any]
) -> list[tf.Tensor]:
    with tf.device(HOST):
        return in_state_dtype(gradients, variables)


def _not_on_host(variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    """Return the variables not updated in place, in the order of updates."""
    return [v for v in reversed(variables) if not is_on_host(v)]


def _store(variable: tf.Variable, change: tf.Tensor) -> None:
    # `tf.cond` may have lost the shape.
    change = tf.ensure_shape(change, variable.shape)
    if is_half(variable.dtype):
        variable.assign(change)
    else:
        variable.assign_sub(change)


def check_averages(model: keras.Model) -> None:
    """Raise if `SwapEMAWeights` cannot swap the averages of an optimizer.

    Optimizers that are not built yet are not checked.
    """
    for each in every_optimizer(model):
        if isinstance(each, HostOptimizer) and each.built and each.use_ema:
            each._placement.shown(each)


Summary = dict[str, dict[str, dict[str, int]]]


def bytes_by_device(
    name: str,
    weights: Sequence[Any],
    state: Iterable[Any],
    master_weights: Iterable[Any],
) -> Summary:
    """Return the bytes of this worker's variables, on devices and on the host.

    The result is {optimizer: {"device" or "host": {kind: bytes}}}. The
    optimizers are `name` and, for comparison, `keras.optimizers.Adam`, which
    stores two moments next to each weight, in the weight's dtype.
    """
    held = _by_device(weights)
    slots = _by_device(state)
    masters = _by_device(master_weights)
    return {
        name: {
            device: {
                "weights": size,
                "state": slots[device],
                "master_weights": masters[device],
            }
            for device, size in held.items()
        },
        "keras.optimizers.Adam": {
            device: {"weights": size, "state": 2 * size, "master_weights": 0}
            for device, size in held.items()
        },
    }


def _by_device(variables: Iterable[Any]) -> dict[str, int]:
    """Return how many bytes of variables are on the host, and on devices."""
    sizes = {"device": 0, "host": 0}
    for variable in variables:
        # A replica may have only some rows of sharded state, or none.
        for copy in map(own_rows, filter(owns_rows, components(variable))):
            device = "host" if is_host(copy.device) else "device"
            sizes[device] += copy.shape.num_elements() * copy.dtype.size
    return sizes
