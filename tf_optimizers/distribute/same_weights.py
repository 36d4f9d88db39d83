"""A check, once an epoch, that all workers have trained alike."""

import weakref
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.adoption import bring_in
from tf_optimizers.distribute.agreement import check_agreement
from tf_optimizers.distribute.digests import digests
from tf_optimizers.distribute.local_steps import has_common_weights
from tf_optimizers.distribute.optimizers import (
    is_wrapper,
    optimizers_of,
    parts_of,
    with_updated,
)


class EpochCheck:
    """Compares weights and learning rates of all workers after every epoch.

    Keras then reads the model's metrics on all workers, which is when they
    compare. If a callback sets a weight or the learning rate on one worker
    alone, the workers differ from then on, and no step would notice. Weights
    that have just made local steps differ on purpose.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._models: weakref.WeakSet[keras.Model] = weakref.WeakSet()

    def watch(self, model: keras.Model) -> None:
        """Check a model from now on.

        Metrics that were made outside of the scope would count the rows of
        this worker alone.
        """
        bring_in(self._strategy, model.metrics_variables)
        self._models.add(model)

    def on_read(self, variable: Any) -> None:
        """Check the model, if any, whose metric all are about to read."""
        for model in list(self._models):
            # One metric is enough to recognize the model by.
            metrics = model.metrics_variables[:1]
            if any(metric.value is variable for metric in metrics):
                self._check(model)

    def _check(self, model: keras.Model) -> None:
        components = self._strategy.experimental_local_results
        is_alike = has_common_weights(model)
        variables = (
            with_updated(model, model.trainable_variables) if is_alike else []
        )
        weights = {
            f"weight {i}": digests(
                part.numpy() for part in components(weight.value)
            )
            for i, weight in enumerate(variables)
        }
        # Keras counts names on with every model that a worker has made.
        shown = {f"weight {i}": w.path for i, w in enumerate(variables)}
        check_agreement(
            self._strategy,
            "the weights and the learning rate after an epoch",
            _rates_of(optimizers_of(model).values()) | weights,
            "Callbacks, and code of your own, must set weights and rates alike "
            "on every worker.",
            shown=shown,
        )


def _rates_of(optimizers: Iterable[Any]) -> dict[str, str]:
    """Return the learning rate, or those of all optimizers in these."""
    parts = {
        id(part): part
        for optimizer in optimizers
        for part in parts_of(optimizer)
        if not is_wrapper(part)
    }
    rates = [
        tf.convert_to_tensor(part.learning_rate).numpy()
        for part in parts.values()
    ]
    if len(rates) == 1:
        return {"learning_rate": str(rates[0])}
    return {
        f"learning_rate of optimizer {i}": str(r) for i, r in enumerate(rates)
    }
