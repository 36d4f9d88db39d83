"""How many bytes a replica sends."""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.base.precision import state_dtype
from tf_optimizers.base.replicas import path_of


def traffic_summary(
    step: int,
    sparsity: float | None,
    variables: Sequence[Any],
    sent: dict[int, int],
) -> dict[str, Any]:
    """Return what one replica sends; see `DGCMomentum`.

    Args:
        step: From 0.
        sparsity: The share held back, or None while all is dense.
        variables: All of the optimizer's.
        sent: Bytes of what is not sent densely, by position in `variables`.
    """
    dense = list(map(_dense_bytes, variables))
    taken = [sent.get(i, size) for i, size in enumerate(dense)]
    paths = map(path_of, variables)
    return {
        "step": step,
        "sparsity": sparsity or 0.0,
        "variables": dict(zip(paths, map(_row, dense, taken), strict=True)),
        "total": _row(sum(dense), sum(taken)),
    }


def _dense_bytes(variable: Any) -> int:
    dtype = tf.as_dtype(state_dtype(variable.dtype))
    return tf.TensorShape(variable.shape).num_elements() * dtype.size


def _row(dense: int, sent: int) -> dict[str, float]:
    ratio = dense / sent if sent else math.inf
    return {"dense_bytes": dense, "sent_bytes": sent, "ratio": ratio}
