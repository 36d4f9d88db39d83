"""How many bytes weights and optimizer state take, and where."""

from collections.abc import Iterable, Sequence
from typing import Any

from tf_optimizers.base.replicas import components
from tf_optimizers.offload.host import is_host

Summary = dict[str, dict[str, dict[str, int]]]


def bytes_by_device(
    name: str,
    weights: Sequence[Any],
    state: Iterable[Any],
    master_weights: Iterable[Any],
) -> Summary:
    """Return {optimizer: {"device" or "host": {what: bytes}}} of this worker.

    The optimizers are `name` and, for comparison, `keras.optimizers.Adam`: it
    keeps two moments wherever there is a weight, in the weight's dtype.
    """
    held = _by_device(weights)
    slots = _by_device(state)
    masters = _by_device(master_weights)
    return {
        name: {
            device: {
                "weights": size,
                "state": slots[device],
                "master_weights": masters[device],
            }
            for device, size in held.items()
        },
        "keras.optimizers.Adam": {
            device: {"weights": size, "state": 2 * size, "master_weights": 0}
            for device, size in held.items()
        },
    }


def _by_device(variables: Iterable[Any]) -> dict[str, int]:
    """Return the bytes of all copies on the host, and of those elsewhere."""
    sizes = {"device": 0, "host": 0}
    for variable in variables:
        for copy in components(variable):
            device = "host" if is_host(copy.device) else "device"
            sizes[device] += copy.shape.num_elements() * copy.dtype.size
    return sizes
