"""The learning rates that a script gives, and those that a backup has."""

from typing import Any

from tf_optimizers.callbacks.state import State


class Rates:
    """The learning rates that optimizers have when `fit` begins.

    Keras keeps a rate that is a number among the optimizer's state, so that
    restoring sets it to what it was. If the script gives another one than it
    gave before, that one is meant to be used.

    Args:
        state: Of the model; nothing is restored yet.

    Attributes:
        given: The rates, in the order of `state`.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._variables = [
            variable
            for variable in state.slots  # A weight may have that name.
            if variable.path.endswith("learning_rate") and variable.shape == ()
        ]
        self.given = [float(v.numpy()) for v in self._variables]

    def set(self, content: dict[str, Any]) -> str:
        """Set rates that are not those that the run of a backup was given.

        Returns a warning, which is empty if there are none.
        """
        before = content.get("rates", self.given)  # 0.1.0 has kept none.
        warning = ""
        for variable, old, new in zip(
            self._variables, before, self.given, strict=False
        ):
            if old != new:
                warning = warning or (
                    "A run resumes with the learning rate that it had, unless "
                    "the script gives another than before. Received: "
                    f"{variable.path}={new:g}, which was {old:g} when the run "
                    "began. The new one is used. To go on with that of the "
                    "backup, give the old one."
                )
                for part in self._state.components(variable):
                    part.assign(new)
        return warning
