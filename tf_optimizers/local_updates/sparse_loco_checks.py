"""Checks SparseLoCo's arguments and its inner optimizer."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.keras_internals import strategy_of
from tf_optimizers.base.components import backend_variable
from tf_optimizers.base.exclusions import Exclusions, check_exclusions
from tf_optimizers.base.inner import check_new, check_part
from tf_optimizers.base.precision import is_half
from tf_optimizers.checks import check_unused
from tf_optimizers.offload.host_optimizer import HostOptimizer
from tf_optimizers.wrapped import wrapped_optimizers

# Arguments that the inner optimizer takes in the place of the outer one, and
# those that the outer takes.
OF_THE_INNER = (
    "learning_rate",
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
)
_OF_THE_OUTER = (
    "use_ema",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)
# The config's entry of names that are excluded from the inner one's decay.
NAMES = "excluded_names"
# Of Keras: the weights follow from their state alone, or mostly.
_ABSOLUTE = tuple(
    getattr(keras.optimizers, name)
    for name in ("Ftrl", "ScheduleFreeAdamW")
    if hasattr(keras.optimizers, name)
)


def check_arguments(arguments: dict[str, Any]) -> Exclusions:
    """Refuse arguments that the inner optimizer takes.

    Returns:
        What a config excludes from the inner one's decay, of which optimizers
        of Keras keep nothing in theirs. It is removed from the arguments.
    """
    hint = "Give it to the inner optimizer."
    check_unused("SparseLoCo", arguments, dict.fromkeys(OF_THE_INNER, hint))
    return check_exclusions(arguments.pop(NAMES, None), arguments)


def check_inner(value: Any, refused: tuple[type, ...]) -> Any:
    """Return `value` if it can be an inner optimizer.

    Args:
        value: The user's argument.
        refused: Classes that exchange gradients themselves.
    """
    check_new(value, lambda part: _check_part(part, refused))
    return value


def _check_part(part: Any, refused: tuple[type, ...]) -> None:
    name = type(part).__name__
    instead = "keras.optimizers.SGD(learning_rate, momentum=0.9)"
    check_part(part, "SparseLoCo", refused, instead)
    if isinstance(part, _ABSOLUTE):
        raise ValueError(
            "`inner_optimizer` must step from the weights that it is given. "
            f"Received: `{name}`, which computes them from sums of its own, so "
            "that a step whose result is held back would be made again. Use "
            "`keras.optimizers.AdamW` or another one."
        )
    for argument in _OF_THE_OUTER:
        given = getattr(part, argument, None)
        if given:
            raise ValueError(
                f"`inner_optimizer` must have no `{argument}`. Received: "
                f"{argument}={given!r} of `{name}`. Pass it to `SparseLoCo`: "
                f"`SparseLoCo({name}(...), {argument}={given!r})`."
            )


def check_under(
    optimizer: Any,
    strategy: tf.distribute.Strategy,
    variables: Sequence[Any],
    refused: tuple[type, ...],
) -> None:
    """Check an inner optimizer against the strategy of the outer one.

    Called again after `build`, when a callable of `MultiOptimizer` has chosen
    its optimizers.
    """
    count = 0
    if variables:
        first = backend_variable(variables[0])
        count = len(strategy.experimental_local_results(first))
    for part in wrapped_optimizers(optimizer):
        _check_part(part, refused)
        name = type(part).__name__
        if strategy_of(part) is not strategy:
            raise ValueError(
                "`inner_optimizer` must be created where `SparseLoCo` is. "
                f"Received: `{name}`, created under {strategy_of(part)}. "
                "Create both in `with strategy.scope():`."
            )
        if isinstance(part, HostOptimizer) and count > 1:
            raise ValueError(
                f"`{name}` inside `SparseLoCo` keeps one state per worker "
                f"process. Received: a process of {count} replicas. "
                "Run one process per device, as `python -m "
                "tf_optimizers.launch` does."
            )


def check_excluded(variables: Sequence[Any]) -> None:
    """Refuse variables that the inner optimizer does not know."""
    for variable in variables:
        if is_half(variable.dtype):
            raise ValueError(
                "`var_list` must not hold half-precision variables, whose "
                "master weights are decayed instead. Received: "
                f"{variable.name}. Pass its name in `var_names`."
            )


def check_averaged(sync_every: int, use_ema: bool) -> None:
    """Refuse averages of weights that are not common in every step."""
    if sync_every > 1 and use_ema:
        raise ValueError(
            "`use_ema` needs weights that are common to all replicas in every "
            f"step. Received: use_ema=True, sync_every={sync_every}. Leave it "
            "out, or pass `sync_every=1`."
        )


def check_layers(layers: Iterable[keras.layers.Layer]) -> None:
    """Refuse layers that assign weights before a step, from state of a replica.

    They would do so before a round notes where it begins.
    """
    for layer in layers:
        if isinstance(layer, keras.layers.SpectralNormalization):
            raise ValueError(
                "Layers must leave their weights to the optimizer where each "
                "replica takes steps of its own. Received: `"
                f"{type(layer).__name__}` '{layer.name}', which divides a "
                "kernel in every step by a norm that it has followed on this "
                "replica alone. Pass `sync_every=1` to `SparseLoCo`, or leave "
                "the layer out."
            )


def check_outside() -> None:
    """Refuse to synchronize in a replica, or in a function being traced."""
    if not tf.executing_eagerly() or (
        tf.distribute.has_strategy()
        and not tf.distribute.in_cross_replica_context()
    ):
        raise RuntimeError(
            "`synchronize` must be called between steps. Received a call "
            "inside of `strategy.run` or `tf.function`. Call it after these, "
            "on every worker."
        )


def check_common(optimizer: Any) -> None:
    """Refuse to save weights of which every replica has its own."""
    if not optimizer.is_synchronized:
        rounds = optimizer._rounds
        raise RuntimeError(
            "Weights must be common to all replicas to be saved. Received: a "
            f"save after {rounds.taken} of {rounds.steps} local steps. Call "
            "`optimizer.synchronize()` before, on every worker; save at the "
            "end of an epoch; or back up with "
            "`tfo.callbacks.BackupAndRestore`, anywhere."
        )
