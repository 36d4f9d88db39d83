"""Turns XLA off for models whose optimizer cannot use it."""

import keras

from tf_optimizers._compat.hooks import choose_xla
from tf_optimizers.wrapped import every_optimizer


def keep_out_of_xla() -> None:
    """Make `compile` turn XLA off for models whose optimizer cannot use XLA.

    Such an optimizer has `_supports_jit = False`, and its constructor calls
    this function. From then on, `jit_compile="auto"`, the default, turns XLA
    off for every model that has such an optimizer, even a wrapped one.
    """
    choose_xla(_cannot_use_xla)


def _cannot_use_xla(model: keras.Model) -> bool:
    return not all(
        getattr(each, "_supports_jit", True) for each in every_optimizer(model)
    )
