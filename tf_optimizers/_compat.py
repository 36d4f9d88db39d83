"""Every private name of TensorFlow and Keras that the package depends on.

Tried with TensorFlow 2.21 and Keras 3.15. tests/test_compat.py names the one
that is gone when a new version no longer has it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util, resource_variable_ops

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tf_optimizers needs Keras's TensorFlow backend. Received: "
        f"{keras.backend.backend()!r}. Set the environment variable "
        "KERAS_BACKEND=tensorflow before keras is imported."
    )

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


class OptimizerHooks(keras.optimizers.Optimizer):
    """`keras.optimizers.Optimizer` with its private steps under public names.

    Subclasses implement `apply_in_replica` and `overwrite_with_averages`.
    """

    def _backend_apply_gradients(
        self, grads: Sequence[Gradient], trainable_variables: Sequence[Any]
    ) -> None:
        # Keras clips, decays, accumulates and averages in here, before the
        # replicas' gradients are summed; there is no public place between
        # `apply`, which unscales them, and `update_step`.
        self.apply_in_replica(list(grads), list(trainable_variables))

    def _overwrite_model_variables_with_average_value(
        self, trainable_variables: Sequence[Any]
    ) -> None:
        # `finalize_variable_values` calls this; Keras's own assigns without a
        # cast, which fails for averages of another dtype than the variable.
        self.overwrite_with_averages(list(trainable_variables))

    def apply_in_replica(
        self, gradients: list[Gradient], variables: list[Any]
    ) -> None:
        """Update `variables` from this replica's unscaled `gradients`."""
        raise NotImplementedError

    def overwrite_with_averages(self, variables: list[Any]) -> None:
        """Assign the moving averages to `variables`."""
        raise NotImplementedError

    def variable_index(self, variable: Any) -> int:
        """Return the position of `variable` in the list given to `build`."""
        # Keras documents this for subclasses, but under a private name.
        return self._get_variable_index(variable)

    def variable_key(self, variable: Any) -> str:
        """Return what identifies `variable` and its replicas' components."""
        # Under a strategy `update_step` is handed components; Keras resolves
        # them to the variable they belong to in here only.
        return self._var_key(variable)

    @property
    def built_variables(self) -> list[Any]:
        """The variables given to `build`."""
        # Keras keeps them for `apply(grads)` and has no public accessor.
        return self._trainable_variables

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy under whose scope the optimizer was created."""
        # Keras keeps it to find the variables' devices after training.
        return self._distribution_strategy

    @property
    def micro_steps(self) -> tf.Tensor:
        """Calls of `apply` so far; `iterations` counts the updates."""
        # `iterations` is divided by `gradient_accumulation_steps`.
        return tf.convert_to_tensor(self._iterations)

    def accumulator(self, variable: Any) -> tf.Variable:
        """Return the sum of gradients that `gradient_accumulation_steps` keeps.

        Keras creates them in `build` and has no public accessor.
        """
        return self._accumulated_gradients[self.variable_index(variable)].value

    def average(self, variable: Any) -> tf.Variable | None:
        """Return the moving average that `use_ema` keeps of `variable`.

        Keras creates them in `build` and has no public accessor. None for
        variables that are overwritten by their gradients (float8 scales).
        """
        index = self.variable_index(variable)
        average = self._model_variables_moving_average[index]
        return None if average is None else average.value

    def is_overwritten(self, variable: Any) -> bool:
        """Tell a variable that its gradient replaces (a float8 scale)."""
        # Keras gives these no slots, and hands no gradients of them on.
        return self._overwrite_variable_with_gradient(variable)


def in_xla() -> bool:
    """Tell whether what is being traced will be compiled by XLA."""
    # `tf.function(jit_compile=True)` opens a context that ops ask for in here
    # only; it has no public name.
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def plain_variable(initial_value: Any, **kwargs: Any) -> tf.Variable:
    """Create one variable that no strategy in scope captures."""
    # `tf.Variable` asks the strategy, which makes one per replica. The class
    # behind it, which has no public name, does not.
    return resource_variable_ops.ResourceVariable(initial_value, **kwargs)


def call_across_replicas(function: Callable, *args: Any) -> Any:
    """Call `function(strategy, *args)` where variables can be updated.

    That is cross-replica context for strategies that merge their replicas
    (`MirroredStrategy`), and the replica itself for those that do not. Which
    of the two a strategy is has no public name.
    """
    return tf.__internal__.distribute.interim.maybe_merge_call(
        function, tf.distribute.get_strategy(), *args
    )


def cond_across_replicas(
    condition: tf.Tensor,
    true_function: Callable,
    false_function: Callable,
    gradients: list[Gradient],
) -> None:
    """Run one of two functions of a replica's gradients.

    Either may reduce over replicas and update variables. A strategy that
    merges its replicas refuses both inside a `tf.cond` that a replica enters,
    so there the cond is entered once and each replica runs inside it.
    """
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(
            condition,
            lambda: true_function(gradients),
            lambda: false_function(gradients),
        )
        return

    def merged(strategy: Any, condition: Any, gradients: Any) -> None:
        def branch(function: Callable) -> Callable:
            return lambda: strategy.extended.call_for_each_replica(
                function, args=(gradients,)
            )

        tf.cond(
            strategy.experimental_local_results(condition)[0],
            branch(true_function),
            branch(false_function),
        )

    tf.distribute.get_replica_context().merge_call(
        merged, args=(condition, gradients)
    )
