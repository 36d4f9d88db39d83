"""How many bytes a replica sends."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.compression.memory import position_dtype
from tf_optimizers.compression.schedule import kept
from tf_optimizers.precision import state_dtype
from tf_optimizers.weight_decay import path_of


def summarize(
    step: int,
    variables: Sequence[Any],
    is_eligible: Callable[[Any], bool],
    sparsity: float | None,
) -> dict[str, Any]:
    """Return what one replica sends; see `DGCMomentum`."""
    traffic = {
        path_of(variable): _traffic(
            variable, sparsity if is_eligible(variable) else None
        )
        for variable in variables
    }
    total = [sum(column) for column in zip(*traffic.values(), strict=True)]
    return {
        "step": step,
        "variables": {
            path: _row(*columns) for path, columns in traffic.items()
        },
        "total": _row(*total),
    }


def _traffic(variable: Any, sparsity: float | None) -> tuple[int, int]:
    size = tf.TensorShape(variable.shape).num_elements()
    value = tf.as_dtype(state_dtype(variable.dtype)).size
    if sparsity is None:
        return size * value, size * value
    pair = value + position_dtype(size).size
    return size * value, kept(size, sparsity) * pair


def _row(dense: int, sent: int) -> dict[str, float]:
    return {"dense_bytes": dense, "sent_bytes": sent, "ratio": dense / sent}
