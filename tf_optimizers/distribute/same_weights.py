"""Whether all workers have trained alike, looked at once an epoch."""

import weakref
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers.distribute.agreement import check_agreement
from tf_optimizers.distribute.digests import digests


class EpochCheck:
    """Compares, at the end of every epoch, what the workers have trained.

    Keras then reads a model's metrics, on all workers. That is when they
    compare its weights and learning rate: a callback that sets either on one
    worker parts them, and no step would notice.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._models: weakref.WeakSet[keras.Model] = weakref.WeakSet()

    def watch(self, model: keras.Model) -> None:
        """Check a model from now on."""
        self._models.add(model)

    def on_read(self, variable: Any) -> None:
        """Check the model, if any, whose metric all are about to read."""
        for model in list(self._models):
            # One of its metrics will do.
            metrics = model.metrics_variables[:1]
            if any(metric.value is variable for metric in metrics):
                self._check(model)

    def _check(self, model: keras.Model) -> None:
        components = self._strategy.experimental_local_results
        weights = {
            weight.path: digests(
                part.numpy() for part in components(weight.value)
            )
            for weight in model.trainable_variables
        }
        check_agreement(
            self._strategy,
            "the weights and the learning rate after an epoch",
            _rates_of(model.optimizer) | weights,
            "Let callbacks and code of your own set weights and rates on every "
            "worker, and alike.",
        )


def _rates_of(optimizer: Any) -> dict[str, str]:
    """Return the rate, or those of all optimizers that it is made of."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    parts = getattr(optimizer, "optimizers", None)
    if parts is None:
        parts = [] if optimizer is None else [optimizer]
    rates = [tf.convert_to_tensor(part.learning_rate).numpy() for part in parts]
    if len(rates) == 1:
        return {"learning_rate": str(rates[0])}
    return {
        f"learning_rate of optimizer {i}": str(r) for i, r in enumerate(rates)
    }
