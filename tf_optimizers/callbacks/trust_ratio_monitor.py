"""Trust ratios, and the norms of weights and updates."""

import statistics
from typing import Any

import tensorflow as tf

from tf_optimizers.callbacks.monitor import Monitor
from tf_optimizers.layerwise import LayerwiseOptimizer
from tf_optimizers.norms import norm
from tf_optimizers.replicas import backend_variable
from tf_optimizers.weight_decay import path_of


class TrustRatioMonitor(Monitor):
    """Shows the trust ratios of `Lamb` or `LANS`, and how far weights move.

    In the logs, over all variables: `trust_ratio_min`, `trust_ratio_median`
    and `trust_ratio_max`; `weight_norm` and `update_norm`, the L2 norms of all
    weights before the step and of their change. In TensorBoard also
    `trust_ratio/<path>`, `weight_norm/<path>` and `update_norm/<path>` of every
    variable.

    A trust ratio is phi(|w|) / |u|, of w before the step; 1 for variables that
    are not adapted. Of the two that `LANS` takes, it is that of the momentum.

    Measuring takes a copy of the weights.

    Args:
        every: int >= 1. Steps, of which one is measured. Defaults to `50`.
        log_dir: None, or the path of TensorBoard's folder.
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

    def before_step(self) -> list[tf.Tensor]:
        """Return a copy of the weights."""
        return self._weights()

    def after_step(self, before: list[tf.Tensor]) -> tuple[dict, dict]:
        """Return summaries, and the figures of each variable."""
        variables = self._variables()
        columns = {
            "trust_ratio": [
                self.optimizer.trust_ratio(variable, weight)
                for variable, weight in zip(variables, before, strict=True)
            ],
            "weight_norm": list(map(norm, before)),
            "update_norm": [
                norm(new - old)
                for new, old in zip(self._weights(), before, strict=True)
            ],
        }
        details = {
            f"{name}/{path_of(variable)}": value
            for name, values in columns.items()
            for variable, value in zip(variables, values, strict=True)
        }
        ratios = list(map(float, columns["trust_ratio"]))
        figures: dict[str, Any] = {
            "trust_ratio_min": min(ratios),
            "trust_ratio_median": statistics.median(ratios),
            "trust_ratio_max": max(ratios),
        }
        for name in ("weight_norm", "update_norm"):
            figures[name] = tf.norm([float(value) for value in columns[name]])
        return figures, details

    def _variables(self) -> list[Any]:
        optimizer = self.optimizer
        return [
            variable
            for variable in optimizer.built_variables
            if not optimizer.is_overwritten(variable)
        ]

    def _weights(self) -> list[tf.Tensor]:
        return [
            tf.convert_to_tensor(
                backend_variable(self.optimizer.master_weight(v) or v)
            )
            for v in self._variables()
        ]
