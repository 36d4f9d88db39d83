"""Measures single steps of an optimizer."""

import importlib.util
import os
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers.adam_offload import AdamOffload
from tf_optimizers.checks import check_integer
from tf_optimizers.replicas import replicas_of
from tf_optimizers.sharded_state import ShardedState
from tf_optimizers.wrapped import every_optimizer


class Monitor(keras.callbacks.Callback):
    """Measures one step in `every`, and shows the figures.

    The figures go into the logs of `fit`, and so into its progress bar and
    history, and stay there until the next measurement. With a `log_dir`, they
    also go to TensorBoard, by optimizer step and with details. All workers
    measure the same steps, and the first worker writes.

    Subclasses list the `optimizers` that they measure, implement `before_step`
    and `after_step`, and document the arguments and errors.
    """

    optimizers: tuple[type, ...]

    def __init__(
        self, every: int = 50, log_dir: str | os.PathLike | None = None
    ) -> None:
        super().__init__()
        self.every = check_integer("every", every, 1)
        if log_dir is not None and not isinstance(log_dir, (str, os.PathLike)):
            raise TypeError(
                f"`log_dir` must be a path or None. Received: {log_dir!r}."
            )
        self.log_dir = log_dir
        self._latest: dict[str, float] = {}
        self._writer = None

    @property
    def optimizer(self) -> Any:
        """The model's first optimizer that can be measured, or its first one.

        A `LossScaleOptimizer` does not count, but its inner optimizer does.
        """
        found = [
            each
            for each in every_optimizer(self.model)
            if not isinstance(each, keras.optimizers.LossScaleOptimizer)
        ]
        measured = [each for each in found if isinstance(each, self.optimizers)]
        return next(iter(measured + found), None)

    def before_step(self) -> Any:
        """Return the values from before the step that `after_step` needs."""
        return None

    def after_step(self, before: Any) -> tuple[dict, dict]:
        """Return the figures for the logs and the details for TensorBoard."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Return whether a measurement may begin or end now."""
        return True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that the model can be measured."""
        name = type(self).__name__
        if not isinstance(self.optimizer, self.optimizers):
            names = " or ".join(f"`{c.__name__}`" for c in self.optimizers)
            raise TypeError(
                f"`{name}` is for {names}. Received: a model with "
                f"`{type(self.optimizer).__name__}`."
            )
        if self.model.steps_per_execution != 1:
            raise ValueError(
                f"`{name}` measures single steps. Received: a model with "
                f"steps_per_execution={self.model.steps_per_execution}. "
                "Compile it with `steps_per_execution=1`."
            )
        if self.log_dir is not None and not importlib.util.find_spec(
            "tensorboard"
        ):
            raise ImportError(
                "`log_dir` needs TensorBoard. Received: "
                f"log_dir={self.log_dir!r}, but TensorBoard is not installed. "
                "Run `pip install tensorboard`."
            )
        self._calls, self._is_due, self._latest = 0, False, {}
        self._pending: tuple[int, Any] | None = None
        worker = replicas_of(self.model.distribute_strategy).worker
        if self.log_dir is not None and worker == 0:
            self._writer = tf.summary.create_file_writer(str(self.log_dir))

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Begin a measurement if one is due."""
        self._calls += 1
        self._is_due |= self._calls % self.every == 0
        if self._pending is None and self._is_due and self._can_measure():
            self._pending = self._step(), self.before_step()
            self._is_due = False

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """End the measurement, unless the step only accumulated gradients."""
        self._end_step(logs)

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Put the latest figures into the history."""
        # A round of local steps may end at the end of the epoch.
        self._end_step(logs)

    def _end_step(self, logs: dict[str, Any] | None) -> None:
        """End a pending measurement if possible; add figures to the logs."""
        pending = self._pending
        if pending and self._can_measure() and self._step() > pending[0]:
            figures, details = self.after_step(pending[1])
            self._pending = None
            self._latest = {name: float(figures[name]) for name in figures}
            self._write(self._latest | details)
        if logs is not None:
            logs.update(self._latest)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close TensorBoard's file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _can_measure(self) -> bool:
        return self.optimizer.built and self.is_ready()

    def _step(self) -> int:
        return int(tf.convert_to_tensor(self.optimizer.iterations))

    def _write(self, scalars: dict[str, Any]) -> None:
        if self._writer is None:
            return
        step = self._step()
        with self._writer.as_default():
            for name, value in scalars.items():
                tf.summary.scalar(name, value, step)
        self._writer.flush()


class OffloadMonitor(Monitor):
    """Shows how many bytes `AdamOffload` keeps on devices and on the host.

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
        TypeError: If an argument has the wrong type; in `fit`, if the
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


class ShardingMonitor(Monitor):
    """Shows how many bytes of state each replica of `ShardedState` has.

    It adds to the logs: `state_bytes`, the bytes of optimizer state on the
    replica that holds most; `state_share`, these as a share of the whole state,
    1 / N at best on N replicas. TensorBoard also gets `state_bytes/replica <i>`
    of each replica. See `ShardedState.memory_summary`.

    Args:
        every: int >= 1. One step in this many is measured. Defaults to `50`.
        log_dir: None, or the path of TensorBoard's log folder.
            Defaults to `None`.

    Raises:
        ImportError: In `fit`, if TensorBoard is needed and not installed.
        TypeError: If an argument has the wrong type; in `fit`, if the
            optimizer is of another class.
        ValueError: If `every` is out of range; in `fit`, with
            `steps_per_execution` other than 1.

    Example:
        >>> import tf_optimizers as tfo
        >>> monitor = tfo.callbacks.ShardingMonitor(every=100)
    """

    optimizers = (ShardedState,)

    def after_step(self, before: Any) -> tuple[dict, dict]:
        """Return the most bytes on any replica, and those of each replica."""
        summary = self.optimizer.memory_summary()
        held = [owned + summary["shared"] for owned in summary["owned"]]
        most = max(held)
        figures = {"state_bytes": most, "state_share": most / summary["whole"]}
        details = {
            f"state_bytes/replica {i}": size for i, size in enumerate(held)
        }
        return figures, details
