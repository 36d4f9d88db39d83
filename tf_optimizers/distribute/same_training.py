"""Checks that all workers take the same first step, and train alike."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_optimizers._compat.keras import micro_steps, strategy_of
from tf_optimizers._compat.strategies import bring_in
from tf_optimizers.agreement.statements import check_agreement
from tf_optimizers.agreement.workers import digests, is_sparse_multi_worker
from tf_optimizers.distribute.optimizers import (
    has_common_weights,
    is_wrapper,
    optimizers_of,
    parts_of,
    with_updated,
)


def check_same_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise unless all workers train alike; they would wait forever."""
    strategy = strategy_of(optimizer)
    if not is_sparse_multi_worker(strategy):
        return
    with tf.init_scope():
        settings = _settings(optimizer)
        step = int(micro_steps(optimizer))
    shapes = {
        f"variable {i}": f"{variable.dtype} {tuple(variable.shape)}"
        for i, variable in enumerate(variables)
    }
    check_agreement(
        strategy,
        "the optimizer's first step",
        {"optimizer": type(optimizer).__name__, "step": step}
        | settings
        | shapes,
    )


def _settings(optimizer: Any) -> dict[str, Any]:
    try:
        return _without_names(optimizer.get_config())
    except NotImplementedError:  # The user's own schedule has no config.
        return {}


def _without_names(settings: Any) -> Any:
    """Return settings without the names of optimizers, inner ones too.

    Keras numbers names by how many a worker has created before.
    """
    if isinstance(settings, (list, tuple)):
        return [_without_names(each) for each in settings]
    if not isinstance(settings, dict):
        return settings
    return {
        key: _without_names(value)
        for key, value in settings.items()
        if key != "name"
    }


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
