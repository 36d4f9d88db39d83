"""Checks the arguments of `SparseLoCo`, and its inner optimizer."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.keras_internals import strategy_of
from tf_optimizers.base.components import backend_variable
from tf_optimizers.base.inner import check_new, check_wrapped
from tf_optimizers.checks import check_unsupported
from tf_optimizers.offload.host_optimizer import HostOptimizer
from tf_optimizers.replicas import replicas_of
from tf_optimizers.wrapped import wrapped_optimizers

INNER_ARGUMENTS = (
    "learning_rate",
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
)
_OUTER_ARGUMENTS = (
    "use_ema",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)
# Keras's optimizers that compute new weights from sums in their own state.
_ABSOLUTE = tuple(
    getattr(keras.optimizers, name)
    for name in ("Ftrl", "ScheduleFreeAdamW")
    if hasattr(keras.optimizers, name)
)


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raise if an argument belongs to the inner optimizer."""
    hint = "Pass it to the inner optimizer."
    hints = dict.fromkeys(INNER_ARGUMENTS, hint)
    check_unsupported("SparseLoCo", arguments, hints)


def check_inner(value: Any, refused: tuple[type, ...]) -> None:
    """Raise unless `SparseLoCo` can wrap `value`.

    Args:
        value: The user's argument.
        refused: Classes of optimizers that exchange gradients themselves.
    """
    check_new(value, lambda inner: _check_wrapped(inner, refused))


def _check_wrapped(inner: Any, refused: tuple[type, ...]) -> None:
    name = type(inner).__name__
    instead = "keras.optimizers.SGD(learning_rate, momentum=0.9)"
    check_wrapped(inner, "SparseLoCo", refused, instead)
    if isinstance(inner, _ABSOLUTE):
        raise ValueError(
            "`inner_optimizer` must update the current weights. Received: "
            f"`{name}`, which computes the weights from its own state, "
            "and would repeat updates that have not been sent yet. Use another "
            "optimizer, such as `keras.optimizers.AdamW`."
        )
    for argument in _OUTER_ARGUMENTS:
        given = getattr(inner, argument, None)
        if given:
            raise ValueError(
                f"`inner_optimizer` must not set `{argument}`. Received: "
                f"`{name}` with {argument}={given!r}. Pass the argument "
                "to `SparseLoCo`: "
                f"`SparseLoCo({name}(...), {argument}={given!r})`."
            )


def check_strategy(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise if an inner optimizer cannot run under the optimizer's strategy.

    Call this before the inner optimizer is built, and again afterwards: a
    callable in `MultiOptimizer` may choose optimizers during `build`.
    """
    strategy, count = strategy_of(optimizer), 0
    if variables:
        first = backend_variable(variables[0])
        count = len(strategy.experimental_local_results(first))
    for inner in wrapped_optimizers(optimizer.inner_optimizer):
        _check_wrapped(inner, optimizer._refused)
        name, found = type(inner).__name__, strategy_of(inner)
        if found is not strategy:
            raise ValueError(
                "`inner_optimizer` must be created under the strategy of "
                f"`SparseLoCo`. Received: `{name}`, created under another "
                f"strategy, {type(found).__name__}. Create both in `with "
                "strategy.scope():`."
            )
        if isinstance(inner, HostOptimizer) and count > 1:
            raise ValueError(
                f"`{name}` inside `SparseLoCo` must run with one replica per "
                f"process. Received: a process with {count} replicas. Use "
                "`tfo.SparseMultiWorkerMirroredStrategy` with one process per "
                "device: pass the number of devices as `--workers` to `python "
                "-m tf_optimizers.launch`."
            )


def check_rounds(optimizer: Any) -> None:
    """Raise if `sync_every`, `use_ema`, `overlap`, `step_ahead` conflict."""
    sync_every, overlap = optimizer.sync_every, optimizer.overlap
    if sync_every > 1 and optimizer.use_ema:
        raise ValueError(
            "`use_ema` needs the same weights on all replicas in every step. "
            f"Received: use_ema=True, sync_every={sync_every}. Leave "
            "`use_ema` out, or pass `sync_every=1`."
        )
    if overlap and sync_every == 1:
        raise ValueError(
            "`overlap` needs a `sync_every` of at least 2. Received: "
            "overlap=True, sync_every=1. Pass a larger `sync_every`, such as "
            "8, or leave `overlap` out."
        )
    if optimizer.step_ahead and (sync_every == 1 or overlap):
        raise ValueError(
            "`step_ahead` needs a `sync_every` of at least 2, and no "
            f"`overlap`. Received: step_ahead={optimizer.step_ahead}, "
            f"sync_every={sync_every}, overlap={overlap}. Leave `step_ahead` "
            "out, or pass a `sync_every` of at least 2, such as 8, without "
            "`overlap`."
        )


def check_can_overlap(optimizer: Any) -> None:
    """Raise if `overlap` is set, but the strategy does not support it.

    Without a strategy, only steps need this check, because a model may be
    loaded to predict.
    """
    strategy = strategy_of(optimizer)
    if optimizer.overlap and not replicas_of(strategy).exchanges_later:
        raise ValueError(
            "`overlap` needs a `tfo.SparseMultiWorkerMirroredStrategy`. "
            f"Received: overlap=True, under {type(strategy).__name__}. Create "
            "the optimizer in the scope of such a strategy, which also runs in "
            "a single process, or leave `overlap` out."
        )


def check_layers(layers: Iterable[keras.layers.Layer]) -> None:
    """Raise if a layer is a `SpectralNormalization`.

    In the first step of a round, its forward pass would change weights before
    the optimizer copies them, so replicas would start from different weights.
    """
    for layer in layers:
        if isinstance(layer, keras.layers.SpectralNormalization):
            raise ValueError(
                "Layers must not assign trainable weights if `sync_every` is "
                f"above 1. Received: `{type(layer).__name__}` '{layer.name}', "
                "which divides its kernel by a norm that differs between "
                "replicas. Pass `sync_every=1` to `SparseLoCo`, or remove the "
                "layer."
            )


def check_between_steps() -> None:
    """Raise if called in `strategy.run`, or while a function is traced."""
    if not tf.executing_eagerly() or (
        tf.distribute.has_strategy()
        and not tf.distribute.in_cross_replica_context()
    ):
        raise RuntimeError(
            "`synchronize` must be called between steps. Received: a call "
            "inside of `strategy.run` or `tf.function`. Call `synchronize` "
            "outside of both, on every worker."
        )


def check_synchronized(optimizer: Any) -> None:
    """Raise if weights that differ between replicas would be saved."""
    if not optimizer.is_synchronized:
        rounds = optimizer._rounds
        raise RuntimeError(
            "Weights must be the same on all replicas to be saved. Received: a "
            f"save after {rounds.taken % rounds.steps or rounds.steps} of "
            f"{rounds.steps} local steps. Call `optimizer.synchronize()` "
            "first, on every worker. Or save at the end of an epoch, or use "
            "`tfo.callbacks.BackupAndRestore`, which can back up after any "
            "step."
        )
