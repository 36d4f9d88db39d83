"""Steps each replica by itself, and exchanges what that has moved."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient
from tf_optimizers._compat.averages import show_averages
from tf_optimizers._compat.keras import (
    is_overwritten,
    strategy_of,
    variable_index,
)
from tf_optimizers._compat.strategies import adopt
from tf_optimizers.base.exclusions import check_exclusions
from tf_optimizers.base.gradients import densify
from tf_optimizers.base.optimizer import Optimizer
from tf_optimizers.base.replicas import backend_variable, own_component
from tf_optimizers.checks import check_unused
from tf_optimizers.compression.compressor import Compressor
from tf_optimizers.compression.residual import subtract
from tf_optimizers.distribute.optimizers import note_local_steps, parts_of
from tf_optimizers.local_updates.checks import (
    check_excluded,
    check_under,
)
from tf_optimizers.local_updates.pseudo_gradients import (
    LocalSteps,
    PseudoGradient,
    worker_means,
)
from tf_optimizers.local_updates.rounds import Choice, Rounds

# Arguments that the inner optimizer takes in the wrapper's place.
_OF_THE_INNER = (
    "learning_rate",
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
)
# The config's entry of names that are excluded from the inner one's decay.
_NAMES = "excluded_names"


class LocalOptimizer(Optimizer):
    """Wraps an optimizer, and compresses what that moves the weights by.

    `SparseLoCo` has settings. Learning rate and decay are the inner one's.

    Args:
        inner_optimizer: The wrapped optimizer.
        **kwargs: See `keras.optimizers.Optimizer`; those of the inner optimizer
            are refused.
    """

    _refused: tuple[type, ...]  # As the inner optimizer.
    sync_every: int
    residual_decay: float
    outer_learning_rate: float
    _compressor: Compressor
    _rounds: Rounds | None = None  # Of several steps.

    def __init__(
        self, inner_optimizer: keras.optimizers.Optimizer, **kwargs: Any
    ) -> None:
        hint = "Give it to the inner optimizer."
        check_unused(
            type(self).__name__, kwargs, dict.fromkeys(_OF_THE_INNER, hint)
        )
        # Of a config; an optimizer of Keras keeps none in its own.
        names = kwargs.pop(_NAMES, None)
        exclusions = check_exclusions(names, kwargs)
        super().__init__(0.0, **kwargs)
        self._exclusions = exclusions
        self.inner_optimizer = inner_optimizer

    @property
    def variables(self) -> list[keras.Variable]:
        """Its own state, followed by the inner optimizer's."""
        return [*super().variables, *self.inner_optimizer.variables]

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set `variables`; Keras's own sets none of another optimizer."""
        own = len(super().variables)
        super().set_weights(weights[:own])
        self.inner_optimizer.set_weights(weights[own:])

    def exclude_from_weight_decay(
        self,
        var_list: Sequence[Any] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Exclude variables from the weight decay of the inner optimizer."""
        check_excluded(var_list or ())
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)
        if not isinstance(self.inner_optimizer, Optimizer):
            super().exclude_from_weight_decay(var_list, var_names)

    def build(self, variables: Sequence[Any]) -> None:
        """Create the residuals and the inner optimizer's state."""
        if self.built:
            return
        for part in [self, *parts_of(self.inner_optimizer)]:
            adopt(part, variables)
        strategy = strategy_of(self)
        checked = self.inner_optimizer, strategy, variables, self._refused
        check_under(*checked)
        super().build(variables)
        if self.use_ema:
            show_averages(self, self.inner_optimizer)
        if strategy.num_replicas_in_sync == 1:
            warnings.warn(
                "SparseLoCo saves traffic between replicas. Received: one "
                "replica, which has none. Use the inner optimizer alone there.",
                stacklevel=2,
            )
        self._compressor.build(strategy)
        wire = self._compressor.wire
        pseudo_gradient = PseudoGradient(
            self.residual_decay, wire.replicas, wire.devices
        )
        masters = self._masters.in_place_of(variables)
        excluded = [w for i, w in enumerate(masters) if not self._is_decayed(i)]
        if excluded:
            self.inner_optimizer.exclude_from_weight_decay(excluded)
        self._steps = LocalSteps(self.inner_optimizer, masters, variables)
        self._steps.build(strategy)
        check_under(*checked)
        with self._steps.variables_beside_state():
            for variable in variables:
                if not is_overwritten(self, variable):
                    self._compressor.add(self, variable, pseudo_gradient)
            if self.sync_every > 1:
                note_local_steps(self)
                self._rounds = Rounds(self, variables, masters, self.sync_every)

    def _update(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> None:
        """Step locally; at the end of a round, exchange pseudo-gradients."""
        sends_all = self._rounds is not None
        gradients = self._compressor.prepare(
            *(self, gradients, variables, sends_all)
        )
        means = worker_means(self._compressor, densify(gradients, variables))
        indices = [variable_index(self, v) for v in variables]
        weights = self._weights(variables)
        step = means, weights, indices, tf.convert_to_tensor(self.iterations)
        if self._rounds is None:
            pseudo_gradients = self._steps.pseudo_gradients(*step)
            send = functools.partial(self._send, variables)
            self._compressor.at_stage(self, pseudo_gradients, send)
            return
        self._rounds.begin(
            self._weights(self._rounds.variables), stepped=variables
        )
        self._steps.step(*step)
        self._store(variables, weights)
        due = self._rounds.exchanges(variables, self._rounds.count())
        self._end_round(self._rounds, due, variables)

    def _end_round(
        self,
        rounds: Rounds,
        due: Sequence[tuple[Choice, tf.Tensor | None]],
        stepped: Sequence[tf.Variable] = (),
    ) -> None:
        """Exchange what weights have moved by in a round, if it is over.

        Args:
            rounds: Knows what they were when it began.
            due: Choices of weights, of which at most one is due; None says
                that it is.
            stepped: Variables of a step of Keras, if this is part of one.
        """
        self._compressor.allocate()
        is_known = self._compressor.rows.indices is not None

        def end(
            choice: Choice, sparsity: float | None, _: list[Gradient]
        ) -> None:
            variables = rounds.chosen(choice)
            weights = self._weights(variables)
            pseudo_gradients = rounds.end(weights, choice)
            self._store(variables, weights)
            # Before it is known what is not compressed, all is sent.
            self._send(
                variables, sparsity if is_known else None, pseudo_gradients
            )
            rounds.constrain(stepped, choice)

        for choice, is_due in due:
            exchange = functools.partial(end, choice)
            self._compressor.at_stage(self, [], exchange, is_due)

    def _send(
        self,
        variables: list[tf.Variable],
        sparsity: float | None,
        pseudo_gradients: list[Gradient],
    ) -> None:
        """Exchange pseudo-gradients, and apply what all replicas have sent."""
        updates = self._compressor.exchange(
            *(
                self,
                sparsity,
                pseudo_gradients,
                variables,
                self._weights(variables),
            )
        )
        rate = tf.constant(self.outer_learning_rate, tf.float64)
        self._step_at(rate, updates, variables)

    def update_step(
        self, gradient: Gradient, variable: Any, learning_rate: Any
    ) -> None:
        """Subtract what was received from a variable, or its component."""
        variable = backend_variable(variable)
        weight = self._full_precision(variable)
        subtract(weight, gradient, tf.cast(learning_rate, weight.dtype))
        self._store_weight(variable, weight)

    def _weights(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        """Return this replica's weights, in full precision."""
        return [self._full_precision(own_component(v)) for v in variables]

    def _store(
        self,
        variables: Sequence[tf.Variable],
        weights: Sequence[tf.Variable],
    ) -> None:
        """Round this replica's weights into half-precision variables."""
        for variable, weight in zip(variables, weights, strict=True):
            self._store_weight(own_component(variable), weight)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        config = super().get_config()
        for name in _OF_THE_INNER:
            del config[name]
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        excluded = self._exclusions.config(self._excluded)
        names = excluded.pop("exclude_from_weight_decay")
        if names:
            excluded[_NAMES] = names
        return config | excluded | {"inner_optimizer": inner}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "LocalOptimizer":
        """Return an optimizer of what `get_config` returned."""
        inner = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        return cls(**config | {"inner_optimizer": inner})
