"""How Keras is made to call what the user has not passed."""

import functools
from collections.abc import Callable, Sequence
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


def check_first(
    names: Sequence[str], check: Callable[[keras.Model], None]
) -> None:
    """Let methods of all models begin with a check of the model.

    From now on in this process. Keras asks an optimizer for its state when the
    file that is to be written has been opened, and its old content is gone.
    """
    for name in names:
        setattr(keras.Model, name, _checked(getattr(keras.Model, name), check))


def _checked(method: Callable, check: Callable[[keras.Model], None]) -> Any:
    @functools.wraps(method)
    def check_and_call(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        check(self)
        return method(self, *args, **kwargs)

    return check_and_call
