"""Checks at the start of `fit` whether callbacks can swap averages."""

import keras

from tf_optimizers._compat.hooks import check_swaps
from tf_optimizers.offload.host import OnHost
from tf_optimizers.wrapped import every_optimizer


def check_swaps_early() -> None:
    """Make `fit` raise before its first step if `SwapEMAWeights` would fail.

    Optimizers that are not built by then are not checked.
    """
    check_swaps(_check)


def _check(model: keras.Model) -> None:
    for optimizer in every_optimizer(model):
        placement = getattr(optimizer, "_placement", None)
        if isinstance(placement, OnHost) and optimizer.built:
            placement.shown(optimizer, getattr(optimizer, "_averages", []))
