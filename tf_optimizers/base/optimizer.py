"""The base class: checks, accumulates, sums and clips gradients."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat import Gradient, distinct
from tf_optimizers._compat.hooks import agree_on_overflow
from tf_optimizers._compat.keras_internals import (
    VARIABLES,
    built_variables,
    strategy_of,
    variable_index,
    with_hooks,
)
from tf_optimizers._compat.strategies import (
    adopt,
    build_together,
    check_in_run,
)
from tf_optimizers._compat.tensorflow_internals import (
    switch_across_replicas,
    update_each,
)
from tf_optimizers.base.averages import Averages
from tf_optimizers.base.components import (
    Accumulators,
    OnReplicas,
    backend_variable,
)
from tf_optimizers.base.exclusions import WEIGHT_DECAY, Excluded, Exclusions
from tf_optimizers.base.gradients import (
    as_gradient,
    check_gradients,
    check_not_empty,
    clip,
    densify,
    in_state_dtype,
)
from tf_optimizers.base.precision import (
    MasterWeights,
    check_floating,
    state_dtype,
    store_weight,
)
from tf_optimizers.checks import check_base_arguments, check_learning_rate
from tf_optimizers.replicas import replicas_of


@with_hooks
class Optimizer(keras.optimizers.Optimizer):
    """A Keras optimizer for several replicas and half-precision weights.

    In `apply`, a replica's gradients pass through these stages:

        check ─ `_cast` ─ (Keras: unscale) ─ `_accumulate` ─ `_update`
                                                                │
              ┌─────────────────────────────────────────────────┘
              └─ `_sum_and_clip` ─ `_step`: `update_step` per variable
                 ─ averages ─ (Keras: constrain)

    `_sum_and_clip` sums gradients over all replicas, makes the sums dense and
    clips the sums. Several optimizers override stages:

        Lamb, LANS    `_step_at`, which `_step` calls: on a GPU, it may update
                      variables of the same shape together
        DGCMomentum   `_update`, which clips compressed gradients before the
                      exchange, and other gradients after it
        AdamOffload   `_accumulate`, which first sums gradients over replicas,
                      because one accumulator serves all replicas; `_step`,
                      which clips and steps once per worker, on the host, and
                      sends the changes

    Float16 and bfloat16 variables have float32 state and float32 master
    weights. Averages and accumulators are where `_placement` puts them: on
    every replica or, once per worker, on the host. `ShardedState` distributes
    the averages of its inner optimizer.

    An optimizer that decays weights in its own formula sets `_exclusions`. This
    class does not apply the decoupled decay of `keras.optimizers.Optimizer`.

    Args:
        learning_rate: float >= 0 (also an int, NumPy scalar or 0-d tensor),
            `LearningRateSchedule`, or callable without arguments.
        **kwargs: See `keras.optimizers.Optimizer`.
    """

    _variables_name = VARIABLES  # The key of `variables` in checkpoints.

    def __init__(self, learning_rate: Any, **kwargs: Any) -> None:
        check_base_arguments(kwargs)
        learning_rate = check_learning_rate(learning_rate)
        super().__init__(learning_rate, **kwargs)
        self._exclusions = Exclusions()
        self._excluded = Excluded()
        self._placement: Any = OnReplicas()

    def build(self, variables: Sequence[Any]) -> None:
        """Create master weights and averages, and find excluded variables.

        Patterns are matched here, not in `update_step`: under a strategy,
        `update_step` gets variables without a path, and loading a model may
        change paths.

        Raises:
            TypeError: If the dtype of a variable is not supported.
            ValueError: If the exclusions in the config do not fit `variables`.
        """
        if self.built:
            return
        adopt(self, variables)
        check_floating(self, variables)
        excluded = self._exclusions.find(self, variables, self._patterns())
        if strategy_of(self).num_replicas_in_sync > 1:
            agree_on_overflow(strategy_of(self))
        super().build(variables)
        self._masters = MasterWeights(self, variables)
        self._ema: Any = Averages(self)
        self._excluded = excluded

    def add_variable(
        self,
        shape: Any,
        initializer: Any = "zeros",
        dtype: Any = None,
        **kwargs: Any,
    ) -> keras.Variable:
        """Add a variable, in float32 if the dtype is of half precision.

        The dtype defaults to `keras.config.floatx()`.
        """
        dtype = state_dtype(dtype)
        return super().add_variable(
            shape, initializer=initializer, dtype=dtype, **kwargs
        )

    def add_variable_from_reference(self, *args: Any, **kwargs: Any) -> Any:
        """Add a variable on the devices of another variable."""
        # Keras may call `build` while a step is traced. TensorFlow would ignore
        # the devices there.
        with tf.init_scope():
            return super().add_variable_from_reference(*args, **kwargs)

    def exclude_from_weight_decay(
        self,
        var_list: Sequence[Any] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Exclude variables from weight decay.

        The constructor's patterns still apply. Each call replaces the
        exclusions of the previous call. Unlike in Keras, the config saves these
        exclusions. A loaded optimizer treats saved names as the constructor's
        patterns. In `strategy.run`, make the same call on every replica.

        Args:
            var_list: Variables to exclude.
            var_names: Regular expressions that match anywhere in
                `variable.name`.

        Raises:
            TypeError: If `var_names` is not a sequence of strings.
            ValueError: If `var_names` has an invalid regular expression.
            RuntimeError: If the optimizer is built, unless this call repeats
                the last call before the build.
        """
        self._exclusions = self._exclusions.with_call(
            self, var_list or (), var_names
        )

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient, Any]]
    ) -> keras.Variable:
        """Apply (gradient, variable) pairs; see `apply`."""
        pairs = list(grads_and_vars)
        check_not_empty(pairs)
        return super().apply_gradients(pairs)

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[Any] | None = None,
    ) -> None:
        """Update each variable with its gradient, in replica context.

        With `gradient_accumulation_steps=n`, only every nth call updates the
        variables.

        Args:
            grads: For each variable, a tensor or `tf.IndexedSlices` of the
                variable's shape, or None if the loss does not depend on the
                variable.
            trainable_variables: The variables. If the optimizer is not built
                yet, it is built with them. Defaults to the variables that the
                optimizer was built with.

        Raises:
            ValueError: If there is no gradient; if the numbers of gradients and
                variables differ; if the shapes of a gradient and its variable
                differ; if the optimizer was built without some of
                `trainable_variables`. In these cases, no variable has changed.
            TypeError: If a gradient does not have a floating-point dtype, or if
                the dtype of a variable is not supported.
            RuntimeError: If the call is outside of `strategy.run`; with one
                replica, only if the call is in the strategy's scope or builds
                the optimizer. Also if workers have different optimizers or
                variables.
        """
        grads = [as_gradient(gradient) for gradient in grads]
        check_not_empty(grads)
        check_in_run(strategy_of(self))
        # If a dataset has an unknown length, one more step begins after the
        # last batch. This step fails before it computes a gradient, and must
        # not change anything, not even `iterations`. So a control dependency
        # makes the update wait for the last gradient.
        values = [getattr(g, "values", g) for g in grads if g is not None]
        last = list(filter(tf.is_symbolic_tensor, values))[-1:]
        if trainable_variables is None and self.built:
            trainable_variables = built_variables(self)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            check_gradients(grads, trainable_variables)
            grads = self._cast(grads, trainable_variables)
            if not self.built:
                build_together(self, distinct(trainable_variables))
            if self.use_ema:
                self._ema.note(grads, trainable_variables)
            group = replicas_of(strategy_of(self))
            group.check_same_optimizer(self, trainable_variables)
        with tf.control_dependencies(last):
            super().apply(grads, trainable_variables)

    def _cast(
        self, gradients: list[Gradient | None], variables: list[Any]
    ) -> list[Any]:
        """Cast gradients to the state's dtype, before Keras unscales them."""
        gradients = in_state_dtype(gradients, variables)
        if self.loss_scale_factor or self.gradient_accumulation_steps:
            # `tf.IndexedSlices` can neither be divided nor added.
            gradients = densify(gradients, variables)
        return gradients

    def _accumulate(
        self, gradients: list[Gradient], variables: list[Any]
    ) -> None:
        """Add gradients to the accumulators, or update the variables."""
        variables = [backend_variable(variable) for variable in variables]
        if not self._state_owner().gradient_accumulation_steps:
            self._update(gradients, variables)
            return
        sums = Accumulators(self._state_owner(), variables, self._placement)

        def update(gradients: list[tf.Tensor]) -> None:
            self._update(sums.means(gradients), variables)
            sums.clear()

        switch_across_replicas(sums.is_full, [sums.add, update], gradients)

    def _update(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> None:
        self._step(self._sum_and_clip(gradients, variables), variables)

    def _sum_and_clip(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> list[Gradient]:
        """Sum gradients over replicas, make the sums dense and clip them."""
        total = densify(replicas_of().sum(gradients), variables)
        return clip(total, self.clipnorm, self.global_clipnorm, self.clipvalue)

    def _step(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> None:
        rate = tf.convert_to_tensor(self.learning_rate)
        self._step_at(rate, gradients, variables)

    def _step_at(
        self,
        learning_rate: tf.Tensor,
        gradients: list[Gradient],
        variables: list[tf.Variable],
    ) -> None:
        """Call `update_step` for each variable, and update the averages."""

        def step(
            variable: tf.Variable, gradient: Gradient, rate: tf.Tensor
        ) -> None:
            self.update_step(gradient, variable, rate)

        rates = [learning_rate] * len(variables)
        update_each(variables, step, gradients, rates)
        self._ema.update()

    def _full_precision(self, variable: tf.Variable) -> tf.Variable:
        """Return a variable's master weight, or the variable if it has none."""
        index = variable_index(self, variable)
        return self._masters.full_precision(index, variable)

    # Call this after you assign to `_full_precision(variable)`.
    _store_weight = staticmethod(store_weight)

    def _state_owner(self) -> Any:
        """Return the optimizer that has the state; by default, this one."""
        # This is a method, because an attribute would make Keras track the
        # variables of that optimizer.
        return self

    def _check_name(self, name: str) -> None:
        """Raise if variables saved under this name must not be restored.

        This class accepts every name.
        """

    def _patterns(self) -> dict[str, Sequence[str] | None]:
        """Return the patterns for purposes other than weight decay."""
        return {}

    def _is_decayed(self, index: int) -> bool:
        """Return whether weight decay applies to the variable at `index`."""
        chosen, has = self._excluded.chosen, self._excluded.has
        return not (index in chosen or has(WEIGHT_DECAY, index))

    def _decay_of(self, index: int) -> float:
        """Return the weight decay of the variable at `index`; 0 if excluded."""
        return self.weight_decay if self._is_decayed(index) else 0.0
