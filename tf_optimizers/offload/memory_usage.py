"""What weights and optimizer state weigh, and where."""

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
    """Return {who: {"device" or "host": {what: bytes}}} of this worker.

    Beside `name`, who is `keras.optimizers.Adam`: its moments have the dtype
    of the weights, of which there are two wherever there is a weight.
    """
    weight_bytes = _by_device(weights)
    mine = _by_device(state), _by_device(master_weights)
    moments = {device: 2 * size for device, size in weight_bytes.items()}
    nothing = dict.fromkeys(weight_bytes, 0)
    return {
        optimizer: {
            device: {
                "weights": weight_bytes[device],
                "state": slots[device],
                "master_weights": masters[device],
            }
            for device in weight_bytes
        }
        for optimizer, (slots, masters) in {
            name: mine,
            "keras.optimizers.Adam": (moments, nothing),
        }.items()
    }


def _by_device(variables: Iterable[Any]) -> dict[str, int]:
    """Return the bytes of all copies on the host, and of those elsewhere."""
    sizes = {"device": 0, "host": 0}
    for variable in variables:
        for copy in components(variable):
            device = "host" if is_host(copy.device) else "device"
            sizes[device] += copy.shape.num_elements() * copy.dtype.size
    return sizes
