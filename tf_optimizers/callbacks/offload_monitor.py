"""How many bytes AdamOffload keeps, and where."""

from typing import Any

from tf_optimizers.adam_offload import AdamOffload
from tf_optimizers.callbacks.monitor import Monitor


class OffloadMonitor(Monitor):
    """Shows how many bytes `AdamOffload` keeps on the host and elsewhere.

    It adds `device_bytes` and `host_bytes` to the logs: the bytes of weights
    and optimizer state of this worker process; see
    `AdamOffload.memory_summary`. TensorBoard also gets their parts: weights,
    state and master weights.

    Args:
        every: int >= 1. One step in this many is measured. Defaults to `50`.
        log_dir: None, or the path of TensorBoard's log folder.
            Defaults to `None`.

    Raises:
        ImportError: In `fit`, if TensorBoard is needed and not installed.
        TypeError: If an argument is of the wrong kind; in `fit`, if the
            optimizer is of another class.
        ValueError: If `every` is out of range; in `fit`, with
            `steps_per_execution` other than 1.

    Example:
        >>> import tf_optimizers as tfo
        >>> monitor = tfo.callbacks.OffloadMonitor(every=100)
    """

    optimizers = (AdamOffload,)

    def after_step(self, before: Any) -> tuple[dict, dict]:
        """Return the bytes by location, and those of their parts."""
        devices = self.optimizer.memory_summary()["AdamOffload"]
        figures = {
            f"{device}_bytes": sum(parts.values())
            for device, parts in devices.items()
        }
        details = {
            f"{device}_bytes/{part}": size
            for device, parts in devices.items()
            for part, size in parts.items()
        }
        return figures, details
