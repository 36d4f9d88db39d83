"""Computes moving averages of weights, for `use_ema`."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.keras_internals import (
    average,
    stepped_variables,
    strategy_of,
    variable_index,
    variable_key,
)
from tf_optimizers._compat.tensorflow_internals import (
    call_across_replicas,
    update_each,
)
from tf_optimizers.base.components import (
    backend_variable,
    local_component,
    value_of,
)


class Averages:
    """The moving averages of an optimizer's weights, in full precision.

    Master weights are averaged in place of half-precision variables.

    Args:
        optimizer: The optimizer that updates the weights. It must have its
            master weights already.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._masters = optimizer._masters
        self._placement = optimizer._placement
        # The keys of the variables that had gradients when `apply` was last
        # called in eager mode or traced.
        self._stepped: frozenset[str] = frozenset()

    def note(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Record which variables have gradients in this step."""
        self._stepped = frozenset(
            variable_key(self._optimizer, variable)
            for variable, gradient in zip(variables, gradients, strict=True)
            if gradient is not None
        )

    def update(self) -> None:
        """Update the averages if `use_ema` is set.

        Every `ema_overwrite_frequency` updates, overwrite the weights with the
        averages.
        """
        if self._optimizer.use_ema:
            call_across_replicas(lambda _: self._update())

    def _update(self) -> None:
        optimizer = self._optimizer
        # The first update sets the averages to the weights.
        self._placement.once(
            "average", lambda: self._average(optimizer.iterations > 0)
        )
        if frequency := optimizer.ema_overwrite_frequency:
            tf.cond(
                (optimizer.iterations + 1) % frequency == 0,
                lambda: self._assign(stepped_variables(self._optimizer)),
                lambda: None,
            )

    def start(self) -> None:
        """Set the averages to the weights if there has been no update yet."""
        if not self._optimizer.use_ema:
            return

        def start() -> None:
            tf.cond(
                self._optimizer.iterations == 0,
                lambda: self._average(False),
                lambda: None,
            )

        # Callbacks may call this method outside of the strategy's scope.
        with strategy_of(self._optimizer).scope():
            self._placement.once("first average", start)

    def shown(self) -> list[Any]:
        """Return the averages in the form that Keras's callbacks expect.

        If there has been no update yet, first set the averages to the weights.
        """
        self.start()
        return self._placement.shown(self._optimizer)

    def overwrite(self, variables: Sequence[Any]) -> None:
        """Overwrite averaged variables with their averages, after training.

        Keras passes only the variables that are trainable now. If a variable
        was frozen after the step was traced, the step still updates it, so this
        method overwrites it, too.
        """
        self.start()
        optimizer = self._optimizer
        listed = {variable_key(optimizer, v) for v in variables}
        moved = [
            variable
            for variable in stepped_variables(self._optimizer)
            if (key := variable_key(optimizer, variable)) in listed
            or (key in self._stepped and not variable.trainable)
        ]
        # Keras may call this method outside of the strategy's scope.
        with strategy_of(optimizer).scope():
            self._assign(moved)

    def _average(self, is_later: Any) -> None:
        """Update the averages; set them to the weights in the first update.

        `is_later` is a bool scalar, false in the first update.
        """
        optimizer = self._optimizer

        def update(variable: tf.Variable) -> None:
            mean = local_component(average(optimizer, variable), variable)
            index = variable_index(optimizer, variable)
            weight = value_of(self._masters.full_precision(index, variable))
            momentum = optimizer.ema_momentum * tf.cast(is_later, mean.dtype)
            mean.assign(momentum * mean + (1 - momentum) * weight)

        variables = list(map(backend_variable, stepped_variables(optimizer)))
        self._placement.update_each(variables, update)

    def _assign(self, variables: Sequence[Any]) -> None:
        """Overwrite variables and their master weights with the averages."""

        def assign(variable: tf.Variable) -> None:
            mean = local_component(average(self._optimizer, variable), variable)
            master = self._masters[variable_index(self._optimizer, variable)]
            with tf.device(mean.device):
                value = tf.cast(mean, variable.dtype)
                if master is not None:
                    local_component(master, variable).assign(mean)
            variable.assign(value)

        update_each(list(map(backend_variable, variables)), assign)
