"""Replaces methods of Keras's models, callbacks and loss scaling.

`patches.py` lists the replaced methods, and the reasons.
"""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import values

from tf_optimizers._compat.keras_internals import (
    global_seeds,
    keep_global_seeds,
    layers_of,
)
from tf_optimizers._compat.patches import (
    REPLICAS,
    SWAPS,
    WITHOUT_XLA,
    check_names,
    has_names,
    hook,
    replace,
)
from tf_optimizers._compat.strategies import replaced
from tf_optimizers._compat.tensorflow_internals import convert


@functools.cache
def build_from_specs(
    is_for: Callable[[tf.distribute.Strategy], bool],
    failed: Callable[[tf.distribute.Strategy], None] = lambda _: None,
) -> None:
    """Permanently make Keras build models from shapes and dtypes of data.

    Under a strategy, Keras itself draws a batch at the start of each `fit` and
    `evaluate`, and averages the batch over replicas. If the model is not built
    yet, Keras builds it from the mean. So a generator would lose this batch,
    and data that cannot be averaged would cause an error.

    If a model has no `call`, or if `call` does not accept the data of a custom
    step, the first step builds the model, as without a strategy.

    Args:
        is_for: Called with a strategy; returns whether models under this
            strategy are built from shapes and dtypes.
        failed: Called with the strategy if a model cannot be built from a batch
            that the user passes, for example to `train_on_batch`.
    """

    def build_from_batch(
        build: Callable, self: Any, iterator: Any = None, data_batch: Any = None
    ) -> None:
        if not is_for(self.distribute_strategy):
            build(self, iterator=iterator, data_batch=data_batch)
            return
        if type(self).call is keras.Model.call:
            return  # The step builds the layers when it calls them.
        spec = data_batch
        if iterator is not None:
            spec = iterator._distributed_dataset.element_spec
            spec = tf.nest.map_structure(_of_first_replica, spec)
            data_batch = tf.nest.map_structure(_symbol, spec)
        by_batch = functools.partial(build, self, data_batch=data_batch)
        leaves = tf.nest.flatten(spec)
        try:
            _build(
                self, by_batch, any(isinstance(e, _COMPOSITE) for e in leaves)
            )
        except Exception:  # The user's code may raise any error.
            if iterator is None:
                failed(self.distribute_strategy)
            raise

    hook("Model._maybe_symbolic_build", build_from_batch)


def _build(
    model: keras.Model, build: Callable[[], None], is_composite: bool
) -> None:
    """Build a model; ignore errors that its step might not raise.

    A custom step may call the model with data other than the batch. With
    `run_eagerly`, `call` or a metric may need values, which symbolic tensors do
    not have. If the batch `is_composite`, `call` may need ragged or sparse
    tensors, but Keras builds models from dense ones. So an error here may be
    harmless. Otherwise, the step raises the error again.

    Raises:
        RuntimeError: If such an error occurs in `call`, which has built some
            layers but not all. The built layers may have wrong shapes. With
            `run_eagerly`, this error is not raised.
    """
    if not (model.run_eagerly or is_composite or _has_custom_step(model)):
        build()
        return
    count, call, returned = len(model.variables), model.call, []

    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        returned.append(True)
        return result

    try:
        with warnings.catch_warnings(), replaced([(model, "call", noted)]):
            warnings.simplefilter("ignore")
            build()
    except Exception as error:  # The user's code may raise any error.
        unbuilt = [each.name for each in layers_of(model) if not each.built]
        # If `call` has returned, the error arose later, for example in a
        # metric. Then the built layers have the right shapes.
        is_partial = unbuilt and len(model.variables) > count and not returned
        if is_partial and not model.run_eagerly:
            raise RuntimeError(
                "A model must be built before its first step, or its `call` "
                f"must accept the data. Received: {model.name}, whose `call` "
                f"has built some layers, but not {', '.join(unbuilt)}. Fix "
                "`call`, or call the model on a batch in the strategy's "
                "scope. The error in `call` was "
                f"{type(error).__name__}: {error}"
            ) from error


def _has_custom_step(model: keras.Model) -> bool:
    return any(
        name in vars(model)
        or getattr(type(model), name) is not getattr(keras.Model, name)
        for name in ("train_step", "test_step", "predict_step")
    )


# Ragged and sparse tensors, and their type specs.
_COMPOSITE = (
    *(tf.RaggedTensor, tf.RaggedTensorSpec),
    *(tf.SparseTensor, tf.SparseTensorSpec),
)


def _of_first_replica(spec: Any) -> Any:
    """Return the type spec for the worker's first replica."""
    is_shared = isinstance(spec, values.PerReplicaSpec)
    return spec._value_specs[0] if is_shared else spec


def _symbol(spec: Any) -> keras.KerasTensor | None:
    """Return a symbolic tensor for a type spec, or None if it has no shape."""
    if not hasattr(spec, "shape"):
        return None
    dtype = keras.backend.standardize_dtype(spec.dtype)
    return keras.KerasTensor(spec.shape, dtype)


class _SharedSeeds:
    """Draws seeds from the generator of the thread that runs the replicas.

    Keras keeps one generator per thread. Each replica of a step runs in a new
    thread, and would create a generator inside the step.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self.generator = global_seeds()

    def next(self, ordered: bool = True) -> Any:
        if self.generator is None:
            # A new thread is outside of all graphs, such as that of a `cond`.
            with futures.ThreadPoolExecutor(1) as thread:
                thread.submit(self._make).result()
        return self.generator.next(ordered)

    def _make(self) -> None:
        with self._strategy.scope():
            self.generator = keras.random.SeedGenerator()


@contextlib.contextmanager
def sharing_seeds(
    strategy: tf.distribute.Strategy, function: Callable
) -> Iterator[Callable]:
    """Let the replicas that call a function share seeds of random ops.

    Yields the function to call instead.
    """
    converted, seeds = convert(function), _SharedSeeds(strategy)

    def call(*args: Any, **kwargs: Any) -> Any:
        keep_global_seeds(seeds)
        return converted(*args, **kwargs)

    try:
        yield tf.autograph.experimental.do_not_convert(call)
    finally:
        keep_global_seeds(seeds.generator)


def insert_callback(
    kind: type[keras.callbacks.Callback],
    is_for: Callable[[keras.Model], bool],
) -> None:
    """Permanently make Keras call a callback before a model's other callbacks.

    Keras's models and optimizers cannot add callbacks. But `fit`, `evaluate`
    and `predict` create a `CallbackList`, and set its model. The hook inserts
    the callback when the model is set, if `is_for(model)` is True.
    """

    def set_model(original: Callable, self: Any, model: keras.Model) -> None:
        is_there = any(isinstance(each, kind) for each in self.callbacks)
        if model and not is_there and is_for(model):
            self.callbacks.insert(0, kind())
        original(self, model)

    hook("CallbackList.set_model", set_model)


@functools.cache
def check_swaps(check: Callable[[keras.Model], None]) -> None:
    """Permanently make Keras call `check(model)` if `SwapEMAWeights` is used.

    The check runs before the first step. If Keras has no
    `CallbackList.set_model`, nothing is replaced, and only the swap of weights
    raises an error.
    """

    def set_model(original: Callable, self: Any, model: keras.Model) -> None:
        original(self, model)
        swap = keras.callbacks.SwapEMAWeights
        if model and any(isinstance(each, swap) for each in self.callbacks):
            check(model)

    if has_names(SWAPS):
        hook("CallbackList.set_model", set_model)


def check_saving(check: Callable[[keras.Model], None]) -> None:
    """Permanently make Keras call `check(model)` before it saves a model.

    The methods `save`, `save_weights` and `export` of models call `check`.
    Keras's function `save_model` does not.
    """

    def save(
        original: Callable, self: keras.Model, *args: Any, **kwargs: Any
    ) -> Any:
        check(self)
        return original(self, *args, **kwargs)

    for name in ("save", "save_weights", "export"):
        hook(f"Model.{name}", save)


@functools.cache
def choose_xla(cannot_use_xla: Callable[[keras.Model], bool]) -> None:
    """Permanently make `jit_compile="auto"` mean `False` for some models.

    Keras resolves "auto" in `compile`, but does not check the optimizer. This
    function adds this check. A custom `compile` may set the optimizer after
    `super().compile()`, so the check is repeated when Keras reads `jit_compile`
    to create a step's function. An explicit `jit_compile` is not changed.

    In a model that was compiled before this function was called, True may come
    from "auto" or be explicit. It counts as explicit if Keras would not choose
    it, and otherwise as "auto". Changing it to False then causes a warning.

    Args:
        cannot_use_xla: Called with a model; returns whether the model's
            optimizer fails under XLA. Not called if Keras itself turns XLA off,
            as on machines with only CPUs.
    """

    def resolve(original: Callable, self: Any) -> bool:
        object.__setattr__(self, _IS_RESOLVING, True)
        return original(self) and not cannot_use_xla(self)

    # If Keras lacks one of the names, replace nothing. A step under XLA then
    # raises an error that asks for `jit_compile=False`.
    if not has_names(WITHOUT_XLA):
        return
    would_choose = keras.Model._resolve_auto_jit_compile

    def property_of(jit_compile: Any) -> property:
        def look(self: Any) -> Any:
            value = jit_compile.fget(self)
            # If the mark is still set, Keras's getter has just resolved "auto",
            # and has stored the result without calling the setter.
            if vars(self).pop(_IS_RESOLVING, False):
                object.__setattr__(self, _IS_AUTO, True)
            is_auto = getattr(self, _IS_AUTO, None)  # None: set earlier.
            if not value or is_auto is False:
                return value
            if is_auto is None and not would_choose(self):
                return value
            if not cannot_use_xla(self):
                return value
            if is_auto is None:
                object.__setattr__(self, _IS_AUTO, True)
                warnings.warn(_XLA_IS_OFF.format(self.name), stacklevel=2)
            return False

        def assign(self: Any, value: Any) -> None:
            is_auto = vars(self).pop(_IS_RESOLVING, False)
            object.__setattr__(self, _IS_AUTO, is_auto)
            jit_compile.fset(self, value)

        return property(look, assign, doc=jit_compile.__doc__)

    hook("Model._resolve_auto_jit_compile", resolve)
    replace("Model.jit_compile", property_of)


_XLA_IS_OFF = (
    "A model's optimizer must be able to run under XLA, or XLA must be off. "
    "Received: {}, which was compiled with XLA, by default or by "
    "`jit_compile=True`, before its optimizer was created. XLA is now off "
    "for this model. Create the optimizer first, or pass `jit_compile=False` "
    "to `compile`."
)
# Set when Keras resolves "auto", and removed once Keras has stored the result.
_IS_RESOLVING = "_tfo_jit_compile_is_resolving"
# Whether the value of `jit_compile` comes from "auto".
_IS_AUTO = "_tfo_jit_compile_is_auto"


# The strategies whose replicas skip the same steps in dynamic loss scaling.
_agreeing: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()


def agree_on_overflow(strategy: tf.distribute.Strategy) -> None:
    """Make a strategy's replicas skip the same steps in dynamic loss scaling.

    Keras (3.15) tests whether gradients are finite before the replicas sum
    them. Under strategies with merge calls, such as `MirroredStrategy`, Keras
    tests only the first replica's gradients. Under other strategies, each
    replica tests only its own gradients, and runs its step inside a `tf.cond`,
    where `iterations` cannot be assigned.

    Keras creates the `LossScaleOptimizer` itself, in `compile`, and would not
    use a subclass. So this function replaces a method of the class. Under a
    strategy that was not passed here, the method behaves as before.
    """
    _agreeing.add(strategy)
    _replace_scaled_step()


@functools.cache
def _replace_scaled_step() -> None:
    def apply(
        apply_alone: Callable,
        optimizer: Any,
        grads: Sequence[Any],
        trainable_variables: Any = None,
    ) -> None:
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.strategy not in _agreeing:
            apply_alone(optimizer, grads, trainable_variables)
        else:
            _apply_together(replica, optimizer, grads, trainable_variables)

    check_names(REPLICAS)
    # A call from an optimizer's `build` is early enough: Keras looks up
    # `_tf_apply` only afterwards.
    hook("LossScaleOptimizer._tf_apply", apply)


def _apply_together(
    replica: Any, optimizer: Any, grads: Sequence[Any], trainable_variables: Any
) -> None:
    """Apply gradients if they are finite on all replicas."""

    def overflow(grads: Sequence[Any]) -> tf.Tensor:
        return tf.cast(~optimizer.check_finite(grads), tf.float32)

    def merged(strategy: Any, grads: Any, variables: Any) -> None:
        extended = strategy.extended
        every = extended.call_for_each_replica(overflow, args=(grads,))
        total = extended.reduce_to(tf.distribute.ReduceOp.SUM, every, every)
        keras.ops.cond(
            strategy.experimental_local_results(total)[0] == 0,
            # Use one branch for all replicas, so that they can exchange values
            # and assign to variables inside it.
            lambda: extended.call_for_each_replica(
                optimizer._stateful_handle_finite_grads,
                args=(grads, variables),
            ),
            optimizer._stateful_handle_non_finite_grads,
        )

    replica.merge_call(merged, args=(grads, trainable_variables))
