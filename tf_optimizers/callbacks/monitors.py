"""Callbacks that measure an optimizer at intervals."""

import importlib.util
import math
import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers._compat import Logs
from tf_optimizers._compat.keras_internals import (
    built_variables,
    stepped_variables,
    strategy_of,
    unique_paths,
)
from tf_optimizers.adam_offload import AdamOffload
from tf_optimizers.base.components import backend_variable, own_component
from tf_optimizers.checks import check_integer
from tf_optimizers.dgc_momentum import DGCMomentum
from tf_optimizers.kernels import norm
from tf_optimizers.lamb import Lamb
from tf_optimizers.lans import LANS
from tf_optimizers.layerwise.layerwise_optimizer import (
    last_trust_ratio,
    weight_of,
)
from tf_optimizers.replicas import replicas_of
from tf_optimizers.sharded_state import ShardedState
from tf_optimizers.sparse_loco import SparseLoCo
from tf_optimizers.wrapped import every_optimizer


class Monitor(keras.callbacks.Callback):
    """Measures steps at intervals, and adds the results to `fit`'s logs.

    The progress bar and the history show the results until the next
    measurement. With a `log_dir`, TensorBoard shows the results, and further
    values of some monitors, by optimizer step. All workers measure the same
    steps, but only the first worker writes to TensorBoard's log folder.

    Subclasses set `optimizers`, the classes that they can measure, and document
    the arguments and errors. They implement `after_step` and, if a measurement
    needs them, `before_step`, `compute` and `is_ready`.
    """

    optimizers: tuple[type, ...]

    def __init__(
        self, every: int = 50, log_dir: str | os.PathLike | None = None
    ) -> None:
        super().__init__()
        self.every = check_integer("every", every, 1)
        if log_dir is not None and not isinstance(log_dir, (str, os.PathLike)):
            raise TypeError(
                "`log_dir` must be a path or None. Received: "
                f"log_dir={log_dir!r}. Pass a string or a `pathlib.Path`."
            )
        self.log_dir = log_dir
        self._latest: dict[str, float] = {}
        self._writer = None

    @property
    def optimizer(self) -> Any:
        """The model's first optimizer that the monitor can measure.

        If there is no such optimizer, this is the model's first optimizer, or
        None if the model has no optimizer. A `LossScaleOptimizer` is skipped,
        but not its inner optimizer.
        """
        found = [
            each
            for each in every_optimizer(self.model)
            if not isinstance(each, keras.optimizers.LossScaleOptimizer)
        ]
        measured = [each for each in found if isinstance(each, self.optimizers)]
        return next(iter(measured + found), None)

    def before_step(self) -> Any:
        """Return values to pass to `after_step`, such as the weights."""
        return None

    def after_step(self, before: Any) -> tuple[dict, dict]:
        """Return values for the logs, and more values for TensorBoard."""
        raise NotImplementedError

    def compute(self, before: Any) -> Any:
        """Return the measured tensors, given values from `before_step`.

        `self._measure` runs this method as a `tf.function`.
        """
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Return whether a measurement may begin or end now."""
        return self.optimizer.built

    def on_train_begin(self, logs: Logs = None) -> None:
        """Check that the monitor supports the model; reset the monitor."""
        name, optimizer = type(self).__name__, self.optimizer
        if not isinstance(optimizer, self.optimizers):
            names = " or ".join(f"`{c.__name__}`" for c in self.optimizers)
            found = f"with `{type(optimizer).__name__}`"
            if optimizer is None:
                found = "without an optimizer"
            raise TypeError(
                f"`{name}` needs a model with {names}. Received: a model "
                f"{found}. Leave the callback out."
            )
        if self.model.steps_per_execution != 1:
            raise ValueError(
                f"`{name}` measures single steps. Received: a model with "
                f"steps_per_execution={self.model.steps_per_execution}. "
                "Compile the model with `steps_per_execution=1`."
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
        self._measure = tf.function(self.compute, autograph=False)
        worker = replicas_of(self.model.distribute_strategy).worker
        if self.log_dir is not None and worker == 0:
            self._writer = tf.summary.create_file_writer(str(self.log_dir))

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Begin a measurement every `every` batches, if possible.

        If not, try again at each batch. For example, a measurement of
        `SparseLoCo` can begin only while all replicas have the same weights.
        """
        self._calls += 1
        self._is_due |= self._calls % self.every == 0
        if self._pending is None and self._is_due and self.is_ready():
            self._pending = self._step(), self.before_step()
            self._is_due = False

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """End a pending measurement if possible; add the results to `logs`.

        For example, it cannot end if the batch has only accumulated gradients.
        """
        self._end_step(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the latest results to the history."""
        # At the end of an epoch, `SparseLoCo` synchronizes the weights, so a
        # pending measurement can end.
        self._end_step(logs)

    def _end_step(self, logs: dict[str, Any] | None) -> None:
        pending = self._pending
        if pending and self.is_ready() and self._step() > pending[0]:
            figures, details = self.after_step(pending[1])
            self._pending = None
            self._latest = {name: float(figures[name]) for name in figures}
            self._write(self._latest | details)
        if logs is not None:
            logs.update(self._latest)

    def on_train_end(self, logs: Logs = None) -> None:
        """Close TensorBoard's file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

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
    """Shows how much `AdamOffload` stores on devices and on the host.

    The monitor adds `device_bytes` and `host_bytes` to the logs: the bytes of
    this worker's weights, optimizer state and master weights on its devices and
    on the host. TensorBoard also gets the bytes of each of these parts. See
    `AdamOffload.memory_summary`.

    Args:
        every: int >= 1. Batches from one measurement to the next.
            Defaults to `50`.
        log_dir: None, or the path of TensorBoard's log folder.
            Defaults to `None`.

    Raises:
        ImportError: In `fit`, if `log_dir` is set, but TensorBoard is not
            installed.
        TypeError: If an argument has the wrong type; in `fit`, if the monitor
            does not support the model's optimizer.
        ValueError: If `every` is out of range; in `fit`, if
            `steps_per_execution` is not 1.

    Example:
        >>> import tf_optimizers as tfo
        >>> monitor = tfo.callbacks.OffloadMonitor(every=100)
    """

    optimizers = (AdamOffload,)

    def after_step(self, before: Any) -> tuple[dict, dict]:
        """Return the bytes on devices and on the host, in total and by part."""
        devices = self.optimizer.memory_summary()[type(self.optimizer).__name__]
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
    """Shows how `ShardedState` divides optimizer state among replicas.

    The monitor adds to the logs:

    - `state_bytes`: the bytes of optimizer state on the replica with the most
      state.
    - `state_share`: `state_bytes` divided by the bytes of the whole state. The
      best value on N replicas is 1 / N.

    TensorBoard also gets `state_bytes/replica <i>` for each replica i. See
    `ShardedState.memory_summary`.

    Args:
        every: int >= 1. Batches from one measurement to the next.
            Defaults to `50`.
        log_dir: None, or the path of TensorBoard's log folder.
            Defaults to `None`.

    Raises:
        ImportError: In `fit`, if `log_dir` is set, but TensorBoard is not
            installed.
        TypeError: If an argument has the wrong type; in `fit`, if the monitor
            does not support the model's optimizer.
        ValueError: If `every` is out of range; in `fit`, if
            `steps_per_execution` is not 1.

    Example:
        >>> import tf_optimizers as tfo
        >>> monitor = tfo.callbacks.ShardingMonitor(every=100)
    """

    optimizers = (ShardedState,)

    def after_step(self, before: Any) -> tuple[dict, dict]:
        """Return the values for the logs, and the bytes on each replica."""
        summary = self.optimizer.memory_summary()
        held = [owned + summary["shared"] for owned in summary["owned"]]
        most = max(held)
        figures = {"state_bytes": most, "state_share": most / summary["whole"]}
        details = {
            f"state_bytes/replica {i}": size for i, size in enumerate(held)
        }
        return figures, details


class CompressionMonitor(Monitor):
    """Shows the traffic and the residuals of `DGCMomentum` or `SparseLoCo`.

    The monitor adds to the logs:

    - `sparsity`: the fraction of a compressed variable's entries that were not
      sent; 0 without compression.
    - `sent_bytes`: the bytes that one replica sent in the exchange. A byte that
      goes to several replicas counts once.
    - `residual_norm`: the L2 norm of all replicas' residuals, the values that
      are not sent yet: v_i of `DGCMomentum`, or e_i of `SparseLoCo`. If M
      devices of a worker share a residual, each counts as 1 / M of it.
    - `residual_age`: the mean number of steps that a value stays in the
      residual before it is sent.

    The age is the L1 norm of all residuals, divided by the L1 norm, per step,
    of the sum of all sent entries. In a steady state, this quotient is the mean
    waiting time (Little's law). If `SparseLoCo` takes several local steps,
    a measurement covers one round. With `overlap`, it covers all rounds between
    two calls of `synchronize`, usually an epoch.

    A measurement copies the compressed weights, and sums two numbers over all
    replicas.

    Args:
        every: int >= 1. Batches from one measurement to the next.
            Defaults to `50`.
        log_dir: None, or the path of TensorBoard's log folder.
            Defaults to `None`.

    Raises:
        ImportError: In `fit`, if `log_dir` is set, but TensorBoard is not
            installed.
        TypeError: If an argument has the wrong type; in `fit`, if the monitor
            does not support the model's optimizer.
        ValueError: If `every` is out of range; in `fit`, if
            `steps_per_execution` is not 1.

    Example:
        >>> import tf_optimizers as tfo
        >>> monitor = tfo.callbacks.CompressionMonitor(every=100)
    """

    optimizers = (DGCMomentum, SparseLoCo)

    def is_ready(self) -> bool:
        """Also require that all replicas have the same weights now."""
        is_synchronized = getattr(self.optimizer, "is_synchronized", True)
        return super().is_ready() and is_synchronized

    def before_step(self) -> tuple[int, float, dict[int, tf.Tensor]]:
        """Return the step, the value of `_factor`, and copies of weights."""
        return self._step(), self._factor(), self._weights()

    def after_step(
        self, before: tuple[int, float, dict[int, tf.Tensor]]
    ) -> tuple[dict, dict]:
        """Return the values for the logs, and nothing more for TensorBoard."""
        start, rate, copies = before
        # Weights with sparse gradients count as compressed before the first
        # step, but not after it.
        weights = {key: copies[key] for key in self._weights()}
        summary = self.optimizer.communication_summary(self._step() - 1)
        held = squares = moved = 0.0
        if weights:
            held, squares, moved = map(float, self._measure(weights))
        age = held and (held * rate / moved if moved else math.inf)
        age *= self._step() - start
        figures = {
            "sparsity": summary["sparsity"],
            "sent_bytes": summary["total"]["sent_bytes"],
            "residual_norm": squares**0.5,
            "residual_age": age,
        }
        return figures, {}

    def _factor(self) -> float:
        """Return the factor that turns sent entries into changes of weights."""
        if isinstance(self.optimizer, SparseLoCo):
            return self.optimizer.outer_learning_rate
        if self.optimizer.rate_in_momentum:
            return 1.0
        return float(tf.convert_to_tensor(self.optimizer.learning_rate))

    def compute(self, weights: dict[int, tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums of |v|, of v^2, and of |change of a weight|.

        Here, v is an entry of a residual, and sums over v include all replicas.
        `weights` contains the weights from `before_step`.
        """

        def own_sums() -> tuple[tf.Tensor, tf.Tensor]:
            residuals = self.optimizer._compressor.residuals
            own = list(map(own_component, residuals))
            return (
                tf.add_n([tf.reduce_sum(tf.abs(v)) for v in own]),
                tf.add_n([2 * tf.nn.l2_loss(v) for v in own]),
            )

        strategy = strategy_of(self.optimizer)
        sums = replicas_of(strategy).reduce_together(strategy.run(own_sums))
        moved = [
            tf.reduce_sum(tf.abs(new - weights[key]))
            for key, new in self._weights().items()
        ]
        return [*sums, tf.add_n(moved)]

    def _weights(self) -> dict[int, tf.Tensor]:
        """Return the weights of compressed variables, by index."""
        optimizer = self.optimizer
        variables = built_variables(optimizer)
        return {
            i: tf.convert_to_tensor(backend_variable(variables[i]))
            for i in optimizer._compressor.compressed
        }


class TrustRatioMonitor(Monitor):
    """Shows the trust ratios of `Lamb` or `LANS`, and how far weights move.

    The monitor adds to the logs, over all variables:

    - `trust_ratio_min`, `trust_ratio_median` and `trust_ratio_max`.
    - `weight_norm`: the L2 norm of all weights before the step.
    - `update_norm`: the L2 norm of the change of all weights in the step.

    TensorBoard also gets `trust_ratio/<path>`, `weight_norm/<path>` and
    `update_norm/<path>` of every variable.

    A trust ratio is phi(|w|) / |u|, as in `Lamb`. Here w is the weight before
    the step. Variables that are not adapted have trust ratio 1. `LANS` has two
    trust ratios; the monitor shows the trust ratio of the momentum. Inside
    `SparseLoCo`, u is computed from the means of m and v over all replicas.

    A measurement copies the weights.

    Args:
        every: int >= 1. Batches from one measurement to the next.
            Defaults to `50`.
        log_dir: None, or the path of TensorBoard's log folder.
            Defaults to `None`.

    Raises:
        ImportError: In `fit`, if `log_dir` is set, but TensorBoard is not
            installed.
        TypeError: If an argument has the wrong type; in `fit`, if the monitor
            does not support the model's optimizer.
        ValueError: If `every` is out of range; in `fit`, if
            `steps_per_execution` is not 1.

    Example:
        >>> import tf_optimizers as tfo
        >>> monitor = tfo.callbacks.TrustRatioMonitor(every=100)
    """

    optimizers = (Lamb, LANS)

    def before_step(self) -> list[tf.Tensor]:
        """Return a copy of the weights."""
        return self._weights()

    def after_step(self, before: list[tf.Tensor]) -> tuple[dict, dict]:
        """Return summaries for the logs, and the values of each variable."""
        variables = unique_paths(stepped_variables(self.optimizer))
        rows = self._measure(before).numpy()
        names = ("trust_ratio", "weight_norm", "update_norm")
        columns = dict(zip(names, rows, strict=True))
        details = {
            f"{name}/{variable}": value
            for name, values in columns.items()
            for variable, value in zip(variables, values, strict=True)
        }
        ratios = columns["trust_ratio"]
        figures: dict[str, Any] = {
            "trust_ratio_min": ratios.min(),
            "trust_ratio_median": np.median(ratios),
            "trust_ratio_max": ratios.max(),
        }
        for name in ("weight_norm", "update_norm"):
            figures[name] = np.linalg.norm(columns[name])
        return figures, details

    def compute(self, before: list[tf.Tensor]) -> tf.Tensor:
        """Return trust ratios, weight norms and update norms.

        The result has a row for each kind, and a column for each variable.
        """
        columns = [
            (
                last_trust_ratio(self.optimizer, variable, old),
                norm(old),
                norm(new - old),
            )
            for variable, old, new in zip(
                stepped_variables(self.optimizer),
                before,
                self._weights(),
                strict=True,
            )
        ]
        return tf.stack(
            [[tf.cast(x, tf.float32) for x in column] for column in columns], 1
        )

    def _weights(self) -> list[tf.Tensor]:
        return [
            weight_of(self.optimizer, v)
            for v in stepped_variables(self.optimizer)
        ]
