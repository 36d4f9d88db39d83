"""Makes Keras call what the user has not passed."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tf_optimizers._compat.patches import replace


def call_first(
    kind: type[keras.callbacks.Callback],
    is_for: Callable[[keras.Model], bool],
) -> None:
    """Let the callbacks of some models begin with one of a kind.

    From now on in this process. `fit`, `evaluate` and `predict` hand their
    callbacks to a list, which is told the model; a model and an optimizer have
    no way to add some.
    """

    def adding(set_model: Callable) -> Callable:
        @functools.wraps(set_model)
        def add_and_set_model(self: Any, model: keras.Model) -> None:
            is_there = any(isinstance(each, kind) for each in self.callbacks)
            if model and not is_there and is_for(model):
                self.callbacks.insert(0, kind())
            set_model(self, model)

        return add_and_set_model

    replace("CallbackList.set_model", adding)


def check_saving(check: Callable[[keras.Model], None]) -> None:
    """Let methods that save models begin with a check of the model.

    From now on in this process.
    """
    for name in ("save", "save_weights", "export"):
        replace(f"Model.{name}", functools.partial(_checked, check))


def _checked(check: Callable[[keras.Model], None], method: Callable) -> Any:
    @functools.wraps(method)
    def check_and_call(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        check(self)
        return method(self, *args, **kwargs)

    return check_and_call
