"""How many bytes a replica sends."""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.base.precision import state_dtype
from tf_optimizers.base.replicas import path_of
from tf_optimizers.compression.exchange import choose_exchange
from tf_optimizers.compression.schedule import sent_count
from tf_optimizers.compression.wire import Wire


def traffic_summary(
    step: int,
    variables: Sequence[Any],
    compressed: Sequence[Any],
    rows: dict[int, int],
    sparsity: float | None,
    wire: Wire,
    kind: str | None,
) -> dict[str, Any]:
    """Return what one replica sends; see `DGCMomentum`.

    Args:
        step: From 0.
        variables: All of the optimizer's.
        compressed: Those of which entries are selected.
        rows: Bytes of sparse gradients, by position in `variables`.
        sparsity: The share held back, or None while all is dense.
        wire: How entries travel.
        kind: See `choose_exchange`.
    """
    dense = {path_of(v): _dense_bytes(v) for v in variables}
    sent = dense | {path_of(variables[i]): rows[i] for i in rows}
    if sparsity is not None:
        sizes = {path_of(v): _size(v) for v in compressed}
        counts = [sent_count(size, sparsity) for size in sizes.values()]
        way = choose_exchange(wire, list(sizes.values()), counts, kind)
        taken = way.sent_bytes()
        sent |= dict(zip(sizes, taken, strict=True))
    return {
        "step": step,
        "sparsity": sparsity or 0.0,
        "variables": {path: _row(dense[path], sent[path]) for path in dense},
        "total": _row(sum(dense.values()), sum(sent.values())),
    }


def _size(variable: Any) -> int:
    return tf.TensorShape(variable.shape).num_elements()


def _dense_bytes(variable: Any) -> int:
    return _size(variable) * tf.as_dtype(state_dtype(variable.dtype)).size


def _row(dense: int, sent: int) -> dict[str, float]:
    ratio = dense / sent if sent else math.inf
    return {"dense_bytes": dense, "sent_bytes": sent, "ratio": ratio}
