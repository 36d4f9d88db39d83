"""Wraps private names of Keras that optimizers and callbacks need."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from tf_optimizers._compat import Gradient, backend_variable, distinct

# Keras's name for the list of an optimizer's variables in checkpoints.
VARIABLES = "_variables"

# Keras's name for the keys of the variables that the user has excluded.
_EXCLUDED = "_exclude_from_weight_decay"


def with_hooks(cls: type) -> type:
    """Override private methods of Keras's `Optimizer` in a subclass.

    The class must define:

    - `_accumulate(gradients, variables)`, called after Keras has unscaled the
      gradients;
    - `_ema`, the `Averages` of the optimizer;
    - `_state_owner()`, which returns the optimizer whose state is saved: `self`
      or a wrapped optimizer;
    - `_variables_name`, the name of the list of variables in checkpoints;
    - `_check_name(name)`, which raises if the optimizer must not read the entry
      `name` of a checkpoint.
    """
    for name, hook in HOOKS.items():
        setattr(cls, name, hook)
    return cls


def has_hooks(optimizer: Any) -> bool:
    """Return whether an optimizer's class has or inherits hooks."""
    return type(optimizer)._backend_apply_gradients is _accumulate


def _accumulate(
    self: Any, gradients: Sequence[Gradient], variables: Any
) -> None:
    # Keras's own method clips and accumulates gradients before they are summed
    # over replicas. There is no public method between `apply`, which unscales
    # gradients, and `update_step`.
    self._accumulate(list(gradients), list(variables))


def _overwrite(self: Any, variables: Sequence[Any]) -> None:
    # `finalize_variable_values` calls this method. Keras's version assigns
    # without a cast, which fails if averages and variables differ in dtype.
    self._ema.overwrite(variables)


def _averages(self: Any) -> list[Any]:
    # `SwapEMAWeights` reads this property, even before the first update.
    return self._ema.shown()


def _set_averages(self: Any, averages: list[Any]) -> None:
    # Keras assigns the averages in `build`.
    self._averages = averages


def _learning_rate(self: Any) -> Any:
    # The public `learning_rate` returns the result of this method. Keras's
    # version calls every schedule with the number of micro-batches.
    if getattr(self._learning_rate, "counts_updates", False):
        return self._learning_rate(self.iterations)
    return keras.optimizers.Optimizer._get_current_learning_rate(self)


def _children(
    self: Any, save_type: str = "checkpoint", **kwargs: Any
) -> dict[str, Any]:
    # TensorFlow calls this method for the names of attributes in checkpoints,
    # and has no public way to change them.
    if self._state_owner() is not self:
        return self._state_owner()._trackable_children(save_type, **kwargs)
    children = keras.optimizers.Optimizer._trackable_children(
        self, save_type, **kwargs
    )
    if save_type == "checkpoint" and VARIABLES in children:
        children[self._variables_name] = children.pop(VARIABLES)
    return children


def _dependency(
    self: Any, name: str, cached_dependencies: dict[str, Any] | None = None
) -> Any:
    # TensorFlow passes `cached_dependencies` only to restore a checkpoint, and
    # looks up all names before it restores any value.
    if cached_dependencies and self._state_owner() is not self:
        return self._state_owner()._lookup_dependency(name, cached_dependencies)
    if cached_dependencies:
        self._check_name(name)
    return keras.optimizers.Optimizer._lookup_dependency(
        self, name, cached_dependencies
    )


HOOKS = {
    "_backend_apply_gradients": _accumulate,
    "_overwrite_model_variables_with_average_value": _overwrite,
    "_model_variables_moving_average": property(_averages, _set_averages),
    "_get_current_learning_rate": _learning_rate,
    "_trackable_children": _children,
    "_lookup_dependency": _dependency,
}


def unchanged_in_cond(error: Exception) -> Exception:
    """Mark an error, so that `keras.ops.cond` does not change its message.

    Dynamic loss scaling runs the step inside `keras.ops.cond`. Without the
    mark, Keras would add "Exception encountered when calling Cond.call()" and a
    list of arguments to the message.
    """
    vars(error)["_keras_call_info_injected"] = True
    return error


def path_of(variable: Any) -> str:
    """Return the path of a Keras variable, or the name of a `tf.Variable`."""
    # TensorFlow appends ":0", the index of the variable's only output.
    return getattr(variable, "path", variable.name.removesuffix(":0"))


def unique_paths(variables: Sequence[Any]) -> list[str]:
    """Return the variables' paths, with numbers appended to duplicates."""
    names: list[str] = []
    seen: Counter[str] = Counter()
    for path in map(path_of, variables):
        seen[path] += 1
        names.append(path if seen[path] == 1 else f"{path} ({seen[path]})")
    return names


def variable_index(optimizer: Any, variable: Any) -> int:
    """Return the position of `variable` in the list given to `build`."""
    # Keras documents this private method for subclasses.
    return optimizer._get_variable_index(variable)


def variable_key(optimizer: Any, variable: Any) -> str:
    """Return a key that is the same for a variable and its components."""
    # Under a strategy, `update_step` gets a replica's component of a variable.
    # Only this private method returns the same key for both.
    return optimizer._var_key(variable)


def excluded_keys(optimizer: Any) -> set[str]:
    """Return the keys of variables that the user has excluded from decay."""
    return getattr(optimizer, _EXCLUDED, set())


def exclude_from_weight_decay(optimizer: Any, variables: Sequence[Any]) -> None:
    """Exclude variables from a Keras optimizer's weight decay.

    Earlier exclusions remain. Keras's own method would replace them.

    The optimizer may already be built. From Keras 3.16 on, Keras's own method
    would then raise an error, because `build` has recorded which variables
    decay.
    """
    recorded = getattr(optimizer, "_weight_decay_by_var_key", None)
    if not optimizer.built or recorded is None:
        kept = excluded_keys(optimizer)
        pattern = getattr(optimizer, f"{_EXCLUDED}_pattern", None)
        names = [pattern.pattern] if pattern else None
        optimizer.exclude_from_weight_decay(variables, names)
        getattr(optimizer, _EXCLUDED).update(kept)
        return
    keys = {variable_key(optimizer, variable) for variable in variables}
    recorded.update(dict.fromkeys(keys & recorded.keys(), False))


def built_variables(optimizer: Any) -> list[Any]:
    """Return the variables given to `build`."""
    # Keras has no public accessor.
    return optimizer._trainable_variables or _scaled_variables(optimizer)


def _scaled_variables(optimizer: Any) -> list[Any]:
    """Return the variables of the optimizer in a `LossScaleOptimizer`.

    The `LossScaleOptimizer` of old versions of Keras (3.10) keeps no list of
    its variables. For other optimizers, the result is empty.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return []
    return built_variables(optimizer.inner_optimizer)


def stepped_variables(optimizer: Any) -> list[Any]:
    """Return the variables that the optimizer updates, without duplicates.

    These are the variables given to `build`, except those that gradients
    overwrite (float8 scales).
    """
    return [
        variable
        for variable in distinct(built_variables(optimizer))
        if not is_overwritten(optimizer, variable)
    ]


def strategy_of(optimizer: Any) -> tf.distribute.Strategy:
    """Return the strategy that an optimizer belongs to."""
    # Keras has no public accessor.
    return optimizer._distribution_strategy


def micro_steps(optimizer: Any) -> tf.Tensor:
    """Return the number of calls to `apply`, one for each micro-batch."""
    # The public `iterations` is this number divided by
    # `gradient_accumulation_steps`.
    return tf.convert_to_tensor(optimizer._iterations)


def raw_iterations(optimizer: Any) -> tf.Variable:
    """Return the variable that counts calls to `apply`."""
    # With gradient accumulation, the public `iterations` is not a variable.
    return optimizer._iterations.value


def accumulator(optimizer: Any, variable: Any) -> tf.Variable:
    """Return the accumulator of a variable's gradients."""
    # Keras creates accumulators in `build`, and has no public accessor.
    index = variable_index(optimizer, variable)
    return optimizer._accumulated_gradients[index].value


def average(optimizer: Any, variable: Any) -> tf.Variable | None:
    """Return the moving average (`use_ema`) of a variable.

    Returns None if gradients overwrite the variable (a float8 scale).
    """
    found = optimizer._averages[variable_index(optimizer, variable)]
    return None if found is None else found.value


def is_overwritten(optimizer: Any, variable: Any) -> bool:
    """Return whether gradients overwrite a variable (a float8 scale)."""
    # For such variables, Keras creates no slots except gradient accumulators,
    # and does not call `update_step`.
    return optimizer._overwrite_variable_with_gradient(variable)


def add_replica_variable(
    optimizer: Any, reference: Any, name: str, dtype: str
) -> keras.Variable:
    """Add a variable, initially 0, with a separate value on every replica.

    The variable has the shape and devices of `reference`. Outside of
    `strategy.run`, a read returns the sum over replicas, and an assigned value
    is divided by the number of replicas. Keras's `add_variable` cannot create
    such variables.
    """
    value = backend_variable(reference)
    with (
        # In a graph, TensorFlow would ignore the devices of `value`.
        tf.init_scope(),
        strategy_of(optimizer).extended.colocate_vars_with(value),
        keras.name_scope(optimizer.name, caller=optimizer),
    ):
        variable = keras.Variable(
            "zeros",
            shape=reference.shape,
            dtype=dtype,
            trainable=False,
            synchronization="on_read",
            aggregation="sum",
            name=f"{path_of(reference).replace('/', '_')}_{name}",
        )
    optimizer._track_variable(variable)
    return variable


def start_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Make `fit` begin at `epoch`; with None or 0, at its `initial_epoch`."""
    # A callback cannot change the arguments of `fit`. But after
    # `on_train_begin`, Keras reads this attribute for its own
    # `BackupAndRestore`.
    model._initial_epoch = epoch


def build_metrics(model: keras.Model, batch: Any) -> None:
    """Create the variables of a model's metrics."""
    # Without a strategy, Keras creates these variables only in the first step.
    own = model.distribute_strategy.experimental_local_results
    batch = tf.nest.map_structure(lambda value: own(value)[0], batch)
    model._symbolic_build(data_batch=without_optionals(batch))


def without_optionals(batch: Any) -> Any:
    """Return a batch with None in place of each optional, as in Keras's steps.

    In data from generators, Keras replaces None with an empty optional. Without
    a strategy, Keras itself turns optionals into None again.
    """
    return tf.nest.map_structure(
        lambda value: (
            None if isinstance(value, tf.experimental.Optional) else value
        ),
        batch,
    )


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Return all layers of a model, including nested layers."""
    # The public `model.layers` has only the first level.
    return model._flatten_layers(include_self=False)


def states_of(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that layers have added with `trainable=False`.

    The result omits weights that were frozen later, and the states of seed
    generators.
    """
    return [
        variable
        for layer in (model, *layers_of(model))
        for variable in layer._non_trainable_variables
    ]


def attributes_of(model: keras.Model, kind: type) -> list[Any]:
    """Return the distinct instances of a class among a model's attributes.

    The search includes the attributes of layers and losses, and the elements of
    lists, tuples and dicts.
    """
    found = _values_of((model, *layers_of(model)))
    found += _values_of([v for v in found if isinstance(v, keras.Loss)])
    return distinct(each for each in found if isinstance(each, kind))


def has_means(metric: keras.metrics.Metric) -> bool:
    """Return whether a metric is a `Mean`, or has one as an attribute."""
    found = (metric, *_values_of([metric]))
    return any(isinstance(each, keras.metrics.Mean) for each in found)


def _values_of(owners: Sequence[Any]) -> list[Any]:
    """Return objects' attributes; replace collections with their elements."""
    found: list[Any] = []
    for owner in owners:
        for value in vars(owner).values():
            if isinstance(value, dict):
                found += value.values()
            else:  # TensorFlow's tuples do not support `+=`.
                is_several = isinstance(value, list | tuple)
                found += [*value] if is_several else [value]
    return found


def global_seeds() -> Any:
    """Return this thread's generator for random ops without a seed, or None."""
    # Keras keeps one generator per thread, under this name.
    return global_state.get_global_attribute("global_seed_generator")


def keep_global_seeds(generator: Any) -> None:
    """Make this thread use a generator for random ops without a seed."""
    global_state.set_global_attribute("global_seed_generator", generator)


def global_seed() -> list[int] | None:
    """Return the state of the generator that unseeded `keras.random` ops use.

    Returns None if there is no generator yet: the first such op creates it.
    """
    generator = global_seeds()
    return None if generator is None else generator.state.numpy().tolist()


def set_global_seed(state: list[int]) -> None:
    """Make unseeded `keras.random` ops continue from a state."""
    generator = global_seeds()
    if generator is None:
        # Without `seed`, Keras would change the state of Python's `random`.
        generator = keras.random.SeedGenerator(seed=0)
        keep_global_seeds(generator)
    generator.state.assign(state)
