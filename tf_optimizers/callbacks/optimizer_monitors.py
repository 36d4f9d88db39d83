"""Monitors of compression and of trust ratios."""

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tf_optimizers._compat.keras_internals import (
    built_variables,
    stepped_variables,
    strategy_of,
)
from tf_optimizers.base.components import backend_variable, own_component
from tf_optimizers.base.exclusions import unique_paths
from tf_optimizers.callbacks.monitors import Monitor
from tf_optimizers.dgc_momentum import DGCMomentum
from tf_optimizers.kernels import norm
from tf_optimizers.layerwise.layerwise_optimizer import (
    LayerwiseOptimizer,
    last_trust_ratio,
    weight_of,
)
from tf_optimizers.sparse_loco import SparseLoCo


class CompressionMonitor(Monitor):
    """Shows the traffic and the residuals of `DGCMomentum` or `SparseLoCo`.

    It adds to the logs: `sparsity`, the share of entries that the step did not
    send, 0 without compression; `sent_bytes`, the bytes that one replica sent;
    `residual_norm`, the L2 norm of v_i (or e_i) of all replicas together;
    `residual_age`, how many steps a value stays in v before it is sent. The age
    is the sum of the residuals divided by that of the sent entries: sum |v_i| /
    |sum of sent entries| in L1 norms. In a steady state, this is the mean
    waiting time (Little's law). With several local steps of `SparseLoCo`, it
    measures a whole round.

    Measuring takes a copy of the weights, and an exchange of two numbers.

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
        >>> monitor = tfo.callbacks.CompressionMonitor(every=100)
    """

    optimizers = (DGCMomentum, SparseLoCo)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that the model can be measured."""
        super().on_train_begin(logs)
        self._measure = tf.function(self._sums, autograph=False)

    def is_ready(self) -> bool:
        """Return whether all replicas have the same weights now."""
        return getattr(self.optimizer, "is_synchronized", True)

    def before_step(self) -> tuple[int, float, dict[int, tf.Tensor]]:
        """Return the step, the rate of v, and a copy of compressed weights."""
        return self._step(), self._factor(), self._weights()

    def after_step(
        self, before: tuple[int, float, dict[int, tf.Tensor]]
    ) -> tuple[dict, dict]:
        """Return figures for the logs, and no details."""
        start, rate, copies = before
        # The first step shows which gradients are sparse.
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
        """Return the factor that v gets when it is sent."""
        if isinstance(self.optimizer, SparseLoCo):
            return self.optimizer.outer_learning_rate
        if self.optimizer.rate_in_momentum:
            return 1.0
        return float(tf.convert_to_tensor(self.optimizer.learning_rate))

    def _sums(self, weights: dict[int, tf.Tensor]) -> list[tf.Tensor]:
        """Return three sums: of |v_i|, of v_i^2, and of |change of weights|.

        The first two are over all entries and replicas.
        """

        def own_sums() -> tuple[tf.Tensor, tf.Tensor]:
            residuals = self.optimizer._compressor.residuals
            own = list(map(own_component, residuals))
            return (
                tf.add_n([tf.reduce_sum(tf.abs(v)) for v in own]),
                tf.add_n([2 * tf.nn.l2_loss(v) for v in own]),
            )

        strategy = strategy_of(self.optimizer)
        sums = [
            strategy.reduce("SUM", value, axis=None)
            for value in strategy.run(own_sums)
        ]
        moved = [
            tf.reduce_sum(tf.abs(new - weights[key]))
            for key, new in self._weights().items()
        ]
        return [*sums, tf.add_n(moved)]

    def _weights(self) -> dict[int, tf.Tensor]:
        """Return the weights that are compressed."""
        optimizer = self.optimizer
        variables = built_variables(optimizer)
        return {
            i: tf.convert_to_tensor(backend_variable(variables[i]))
            for i in optimizer._compressor.compressed
        }


class TrustRatioMonitor(Monitor):
    """Shows the trust ratios of `Lamb` or `LANS`, and how far weights move.

    It adds to the logs, over all variables: `trust_ratio_min`,
    `trust_ratio_median` and `trust_ratio_max`; `weight_norm` and
    `update_norm`, the L2 norms of all weights before the step and of their
    change. TensorBoard also gets `trust_ratio/<path>`, `weight_norm/<path>` and
    `update_norm/<path>` of every variable.

    A trust ratio is phi(|w|) / |u|, with w before the step; it is 1 for
    variables that are not adapted. `LANS` has two trust ratios; this is the one
    of the momentum.

    Measuring takes a copy of the weights.

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
        >>> monitor = tfo.callbacks.TrustRatioMonitor(every=100)
    """

    optimizers = (LayerwiseOptimizer,)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that the model can be measured."""
        super().on_train_begin(logs)
        self._measure = tf.function(self._rows, autograph=False)

    def before_step(self) -> list[tf.Tensor]:
        """Return a copy of the weights."""
        return self._weights()

    def after_step(self, before: list[tf.Tensor]) -> tuple[dict, dict]:
        """Return summaries for the logs, and each variable's figures."""
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

    def _rows(self, before: list[tf.Tensor]) -> tf.Tensor:
        """Return [3, variables]: ratios, and norms of weights and updates."""
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
