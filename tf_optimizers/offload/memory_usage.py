"""What weights and optimizer state weigh, and where."""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers.base.replicas import components
from tf_optimizers.offload.host import is_host

Summary = dict[str, dict[str, dict[str, int]]]


def bytes_by_device(
    name: str,
    weights: Sequence[Any],
    state: Iterable[Any],
    master_weights: Iterable[Any],
) -> Summary:
    """Return {who: {"device" or "host": {what: bytes}}} of this worker.

    Beside `name`, who is `keras.optimizers.Adam`: its moments have the dtype
    of the weights, of which there are two wherever there is a weight.
    """
    placed = _by_place(weights)
    moments = {place: 2 * size for place, size in placed.items()}
    nothing = dict.fromkeys(placed, 0)
    return {
        name: _table(placed, _by_place(state), _by_place(master_weights)),
        "keras.optimizers.Adam": _table(placed, moments, nothing),
    }


def _table(
    weights: dict[str, int], state: dict[str, int], masters: dict[str, int]
) -> dict[str, dict[str, int]]:
    return {
        place: {
            "weights": weights[place],
            "state": state[place],
            "master_weights": masters[place],
        }
        for place in weights
    }


def _by_place(variables: Iterable[Any]) -> dict[str, int]:
    """Return the bytes of all copies on the host, and of those elsewhere."""
    sizes = {"device": 0, "host": 0}
    for variable in variables:
        for component in components(variable):
            place = "host" if is_host(component.device) else "device"
            sizes[place] += _size(component)
    return sizes


def _size(variable: tf.Variable) -> int:
    return variable.shape.num_elements() * variable.dtype.size
