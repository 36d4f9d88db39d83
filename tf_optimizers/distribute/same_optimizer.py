"""A check that all workers are about to take the same first step."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.keras import micro_steps, strategy_of
from tf_optimizers.distribute.agreement import check_agreement
from tf_optimizers.distribute.kind import is_sparse_multi_worker


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
