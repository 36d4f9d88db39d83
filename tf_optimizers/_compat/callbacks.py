"""How Keras is made to call callbacks that the user has not passed."""

from collections.abc import Callable
from typing import Any

import keras


def call_first(
    kind: type[keras.callbacks.Callback],
    is_for: Callable[[keras.Model], bool],
) -> None:
    """Let the callbacks of some models begin with one of a kind.

    From now on in this process. `fit`, `evaluate` and `predict` hand their
    callbacks to a list, which is told the model; a model and an optimizer have
    no way to add some.
    """
    set_model = keras.callbacks.CallbackList.set_model

    def add_and_set_model(self: Any, model: keras.Model) -> None:
        is_there = any(isinstance(each, kind) for each in self.callbacks)
        if model and not is_there and is_for(model):
            self.callbacks.insert(0, kind())
        set_model(self, model)

    keras.callbacks.CallbackList.set_model = add_and_set_model
