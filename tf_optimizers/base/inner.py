"""Wraps an inner optimizer, and runs it on each replica separately."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.keras_internals import (
    built_variables,
    exclude_from_weight_decay,
    excluded_keys,
    variable_key,
)
from tf_optimizers._compat.owned import own_rows
from tf_optimizers._compat.strategies import (
    Attribute,
    adopt,
    named_like,
    outside_strategy,
    replaced,
    unconstrained,
)
from tf_optimizers.base.components import own_component
from tf_optimizers.base.exclusions import PATTERNS, check_exclusions
from tf_optimizers.base.optimizer import Optimizer
from tf_optimizers.wrapped import wrapped_optimizers


def _of_inner(name: str) -> property:
    """Return a property that reads and sets the inner optimizer's attribute."""

    def set_in_inner(optimizer: Any, value: Any) -> None:
        # Keras's constructor assigns None before the inner optimizer is set.
        if "inner_optimizer" in vars(optimizer):
            setattr(optimizer.inner_optimizer, name, value)

    return property(
        lambda optimizer: getattr(optimizer.inner_optimizer, name),
        set_in_inner,
        doc=f"The inner optimizer's `{name}`.",
    )


class Wrapper(Optimizer):
    """Wraps an inner optimizer; shares its learning rate, decay and clipping.

    `build` passes the exclusions from weight decay to the inner optimizer. The
    config of this optimizer saves them, because the config of a Keras optimizer
    does not.

    Args:
        inner_optimizer: The wrapped optimizer.
        *args: Arguments that follow the learning rate in the constructor of the
            next class in the method resolution order.
        **kwargs: Keyword arguments of that constructor.
    """

    learning_rate = _of_inner("learning_rate")
    weight_decay, clipnorm = _of_inner("weight_decay"), _of_inner("clipnorm")
    clipvalue = _of_inner("clipvalue")
    global_clipnorm = _of_inner("global_clipnorm")

    def __init__(self, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(0.0, *args, **kwargs)
        self.inner_optimizer = inner_optimizer

    def _exclude(
        self, variables: Sequence[Any], weights: Sequence[Any]
    ) -> None:
        """Exclude variables from the inner optimizer's weight decay.

        The inner optimizer updates `weights`: the variables, or their master
        weights. Call this method before the inner optimizer is built, for
        Keras's optimizers, and again afterwards, for ours and for optimizers
        that a `MultiOptimizer` creates in `build`.
        """
        chosen = [w for i, w in enumerate(weights) if not self._is_decayed(i)]
        for each in wrapped_optimizers(self.inner_optimizer):
            _exclude_masters(each, variables, weights)
            if chosen:
                _exclude_from(each, chosen)

    def _adopt(self, variables: Sequence[Any]) -> None:
        for each in wrapped_optimizers(self):
            adopt(each, variables)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, and the exclusions."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        excluded = self._exclusions.config(self._excluded)
        given = {key: value for key, value in excluded.items() if value}
        return super().get_config() | {"inner_optimizer": inner} | given

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "Wrapper":
        """Create an optimizer from its config."""
        config = dict(config)
        exclusions = check_exclusions(config.pop(PATTERNS, None), config)
        inner = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        optimizer = cls(**config | {"inner_optimizer": inner})
        optimizer._exclusions = exclusions
        return optimizer


def _exclude_masters(
    inner: Any, variables: Sequence[Any], weights: Sequence[Any]
) -> None:
    """Exclude the master weights of variables that the user has excluded."""
    masters = {
        variable_key(inner, variable): weight
        for variable, weight in zip(variables, weights, strict=True)
        if variable is not weight
    }
    if isinstance(inner, Optimizer):
        inner._exclusions = inner._exclusions.with_masters(inner, masters)
        return
    chosen = [masters[key] for key in excluded_keys(inner) if key in masters]
    if chosen:
        exclude_from_weight_decay(inner, chosen)


def _exclude_from(inner: Any, variables: Sequence[Any]) -> None:
    """Exclude variables from an optimizer's weight decay.

    Variables that the optimizer does not update are ignored. An optimizer of
    this package that is not built yet is not changed.
    """
    if not isinstance(inner, Optimizer):
        exclude_from_weight_decay(inner, variables)
        return
    keys = {variable_key(inner, variable) for variable in variables}
    excluded = inner._excluded
    more = {
        i
        for i, variable in enumerate(built_variables(inner))
        if variable_key(inner, variable) in keys
    } - excluded.chosen
    inner._excluded = dataclasses.replace(
        excluded,
        chosen=excluded.chosen | more,
        by_wrapper=excluded.by_wrapper | more,
    )


def check_new(value: Any, check: Callable[[Any], None]) -> None:
    """Raise if `value` is not an optimizer, or is already built.

    `check` is called with `value` and with every optimizer that `value` wraps.
    """
    if not isinstance(value, keras.optimizers.Optimizer):
        raise TypeError(
            "`inner_optimizer` must be a Keras optimizer, such as "
            "`keras.optimizers.AdamW(1e-3)`. Received: "
            f"inner_optimizer={value!r}."
        )
    for each in wrapped_optimizers(value):
        check(each)
    if value.built:
        name = type(value).__name__
        raise ValueError(
            f"`inner_optimizer` must be new. Received: `{name}`, which is "
            f"already built. Pass `{name}.from_config(optimizer.get_config())`."
        )


def check_wrapped(
    inner: Any, outer: str, refused: tuple[type, ...], instead: str
) -> None:
    """Raise if an inner optimizer scales the loss or exchanges gradients.

    Args:
        inner: The inner optimizer, or an optimizer that it wraps.
        outer: The name of the outer optimizer's class, for the error.
        refused: Classes of optimizers that exchange gradients themselves.
        instead: The optimizer that the error suggests.
    """
    name = type(inner).__name__
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`inner_optimizer` must not scale the loss. Received: "
            f"`LossScaleOptimizer`. Wrap `{outer}` instead: "
            f"`LossScaleOptimizer({outer}(...))`."
        )
    if isinstance(inner, refused):
        raise ValueError(
            "`inner_optimizer` must leave the exchange between replicas to "
            f"`{outer}`. Received: `{name}`, which exchanges values itself. "
            f"Pass `{instead}`, or use `{name}` alone."
        )


class InnerSteps:
    """Runs an inner optimizer on the calling replica's own weights.

    Args:
        optimizer: The inner optimizer.
        variables: The variables that the inner optimizer is built with: the
            model's variables. In `SparseLoCo`, master weights replace
            half-precision variables.
        likes: The model's variables. During a step, `variables` have the names
            and paths of `likes`.
    """

    def __init__(
        self, optimizer: Any, variables: Sequence[Any], likes: Sequence[Any]
    ) -> None:
        self._optimizer = optimizer
        self._variables = list(variables)
        self._names = [
            attribute
            for variable, like in zip(variables, likes, strict=True)
            if variable is not like
            for attribute in named_like(variable, like)
        ]

    def step_on_replica(
        self,
        gradients: Sequence[tf.Tensor],
        weights: Sequence[tf.Variable],
        indices: Sequence[int],
        settings: Sequence[Attribute] = (),
    ) -> None:
        """Update this replica's weights, but do not apply constraints.

        Args:
            gradients: Dense gradients of the weights.
            weights: This replica's components of the variables. If a variable
                is split, its weight has only the rows that this replica owns.
            indices: The position of each weight's variable in `variables`.
            settings: Attributes to replace during the step; see `replaced`.
        """
        moved = [self._variables[i] for i in indices]
        shown = [
            variable
            if isinstance(variable, keras.Variable)
            and variable.shape == weight.shape  # The variable is not split.
            else weight
            for variable, weight in zip(moved, weights, strict=True)
        ]
        seen = self._outside_strategy(moved, weights)
        with seen, replaced([*unconstrained(shown), *settings]):
            for each in _single_optimizers(self._optimizer):
                known = set(map(id, built_variables(each)))
                own = [i for i, v in enumerate(moved) if id(v) in known]
                if own:
                    each.apply(
                        [gradients[i] for i in own], [shown[i] for i in own]
                    )

    @contextlib.contextmanager
    def _outside_strategy(
        self, variables: Sequence[Any], weights: Sequence[tf.Variable]
    ) -> Iterator[None]:
        """Hide the strategy and the other replicas from the optimizer."""
        optimizers = wrapped_optimizers(self._optimizer)
        state = [
            (variable, own_rows(own_component(variable)))
            for each in optimizers
            for variable in each.variables
        ]
        moved = [
            (variable, weight)
            for variable, weight in zip(variables, weights, strict=True)
            if isinstance(variable, keras.Variable)
        ]
        changed = [*state, *moved]
        with replaced(self._names), outside_strategy(optimizers, changed):
            yield


def _single_optimizers(optimizer: Any) -> Sequence[Any]:
    """Return a `MultiOptimizer`'s optimizers, or the given optimizer in a list.

    Callers apply each optimizer separately, because a `MultiOptimizer` (new in
    Keras 3.15) fails if one of its optimizers has no gradients.
    """
    kind = getattr(keras.optimizers, "MultiOptimizer", ())
    return optimizer.optimizers if isinstance(optimizer, kind) else [optimizer]
