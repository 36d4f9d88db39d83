"""Keeps the steps of some optimizers out of XLA."""

import keras

from tf_optimizers._compat.hooks import choose_xla
from tf_optimizers.wrapped import optimizers_of, wrapped_optimizers


def keep_out_of_xla() -> None:
    """Let `compile` keep models out of XLA whose optimizer cannot run there.

    Such an optimizer has `_supports_jit = False`, and calls this when it is
    made. From then on `jit_compile="auto"`, the default, means "not by XLA" for
    each model that has one, wherever it hangs.
    """
    choose_xla(_has_one)


def _has_one(model: keras.Model) -> bool:
    """Return whether a model has an optimizer that cannot run under XLA."""
    return not all(
        getattr(part, "_supports_jit", True)
        for optimizer in optimizers_of(model).values()
        for part in wrapped_optimizers(optimizer)
    )
