"""Monitors trust ratios, and the norms of weights and updates."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_optimizers._compat.keras import (
    built_variables,
    is_overwritten,
)
from tf_optimizers.base.exclusions import names_apart
from tf_optimizers.callbacks.monitors import Monitor
from tf_optimizers.kernels.norms import norm
from tf_optimizers.layerwise.optimizer import (
    LayerwiseOptimizer,
    trust_ratio,
    weight_of,
)


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
        TypeError: If an argument is of the wrong kind; in `fit`, if the
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
        """Return summaries, and the figures of each variable."""
        variables = names_apart(self._variables())
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
                trust_ratio(self.optimizer, variable, old),
                norm(old),
                norm(new - old),
            )
            for variable, old, new in zip(
                self._variables(), before, self._weights(), strict=True
            )
        ]
        return tf.stack(
            [[tf.cast(x, tf.float32) for x in column] for column in columns], 1
        )

    def _variables(self) -> list[Any]:
        optimizer = self.optimizer
        return [
            variable
            for variable in built_variables(optimizer)
            if not is_overwritten(optimizer, variable)
        ]

    def _weights(self) -> list[tf.Tensor]:
        return [weight_of(self.optimizer, v) for v in self._variables()]
