"""How many bytes a replica sends."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.compression.schedule import kept
from tf_optimizers.compression.wire import Wire
from tf_optimizers.precision import state_dtype
from tf_optimizers.weight_decay import path_of


def summarize(
    step: int,
    variables: Sequence[Any],
    is_eligible: Callable[[Any], bool],
    sparsity: float | None,
    wire: Wire,
) -> dict[str, Any]:
    """Return what one replica sends; see `DGCMomentum`."""
    traffic = {
        path_of(variable): _traffic(
            variable, sparsity if is_eligible(variable) else None, wire
        )
        for variable in variables
    }
    total = [sum(column) for column in zip(*traffic.values(), strict=True)]
    return {
        "step": step,
        "sparsity": sparsity or 0.0,
        "variables": {
            path: _row(*columns) for path, columns in traffic.items()
        },
        "total": _row(*total),
    }


def _traffic(
    variable: Any, sparsity: float | None, wire: Wire
) -> tuple[int, int]:
    size = tf.TensorShape(variable.shape).num_elements()
    dense = size * tf.as_dtype(state_dtype(variable.dtype)).size
    if sparsity is None:
        return dense, dense
    return dense, wire.sent_bytes(size, wire.share(kept(size, sparsity)))


def _row(dense: int, sent: int) -> dict[str, float]:
    return {"dense_bytes": dense, "sent_bytes": sent, "ratio": dense / sent}
