"""Checks the inner optimizer of `ShardedState`."""

from typing import Any

import tensorflow as tf

from tf_optimizers._compat.keras_internals import is_overwritten
from tf_optimizers.base.inner import check_new, check_part
from tf_optimizers.base.optimizer import Optimizer
from tf_optimizers.compression.compressed_optimizer import CompressedOptimizer
from tf_optimizers.offload.host_optimizer import HostOptimizer
from tf_optimizers.replicas import replicas_of
from tf_optimizers.wrapped import is_wrapper


def check_inner(value: Any, itself: type) -> None:
    """Raise unless `value` is a new optimizer that `ShardedState` can wrap."""
    refused = (CompressedOptimizer, itself)

    def check(part: Any) -> None:
        instead = "keras.optimizers.AdamW(1e-3)"
        check_part(part, "ShardedState", refused, instead)
        if is_wrapper(part) or hasattr(part, "optimizers"):
            raise ValueError(
                "`inner_optimizer` must be one optimizer. Received: "
                f"`{type(part).__name__}`. Put `ShardedState` around each "
                "optimizer inside it."
            )

    check_new(value, check)


def check_distributed(
    inner: Any, strategy: tf.distribute.Strategy, variables: list[Any]
) -> None:
    """Raise if the state cannot be distributed among several replicas."""
    if not replicas_of(strategy).has_owners:
        raise ValueError(
            "`ShardedState` must be used under `MirroredStrategy` or "
            "`tfo.SparseMultiWorkerMirroredStrategy`. Received: "
            f"{type(strategy).__name__}. Create the model and the optimizer in "
            "the scope of one of these."
        )
    given = inner.gradient_accumulation_steps
    if given and isinstance(inner, HostOptimizer):
        raise ValueError(
            "`inner_optimizer` must keep gradients on the devices. Received: "
            f"`{type(inner).__name__}` with gradient_accumulation_steps="
            f"{given}, which keeps them on the host. Leave out "
            "`gradient_accumulation_steps`, or pass `keras.optimizers.Adam`."
        )
    if given and inner.use_ema and not isinstance(inner, Optimizer):
        raise ValueError(
            "`ShardedState` cannot combine `use_ema` with "
            "`gradient_accumulation_steps`. Received: "
            f"`{type(inner).__name__}` with use_ema=True and "
            f"gradient_accumulation_steps={given}: Keras updates its averages "
            "after every batch. Leave one of the two out."
        )
    for variable in variables:
        if is_overwritten(inner, variable):
            raise ValueError(
                "`ShardedState` cannot update variables that their "
                "gradients overwrite, such as float8 scales. Received: "
                f"{variable.name}. "
                f"Use `{type(inner).__name__}` without `ShardedState`."
            )
