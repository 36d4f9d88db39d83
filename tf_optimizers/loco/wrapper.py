"""The public face of an optimizer that wraps another."""

from collections.abc import Sequence
from typing import Any

import keras

from tf_optimizers.base.optimizer import Optimizer
from tf_optimizers.checks import check_unused
from tf_optimizers.loco.checks import check_excluded

# Arguments that the inner optimizer takes in the wrapper's place.
_OF_THE_INNER = (
    "learning_rate",
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
)


class Wrapper(Optimizer):
    """An optimizer that takes learning rate and decay from an inner one.

    Args:
        inner_optimizer: The wrapped optimizer.
        **kwargs: See `keras.optimizers.Optimizer`; those of the inner optimizer
            are refused.
    """

    def __init__(
        self, inner_optimizer: keras.optimizers.Optimizer, **kwargs: Any
    ) -> None:
        way_out = "Give it to the inner optimizer."
        check_unused(
            type(self).__name__, kwargs, dict.fromkeys(_OF_THE_INNER, way_out)
        )
        super().__init__(0.0, **kwargs)
        self.inner_optimizer = inner_optimizer

    @property
    def variables(self) -> list[keras.Variable]:
        """Its own state, followed by the inner optimizer's."""
        return [*super().variables, *self.inner_optimizer.variables]

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    def exclude_from_weight_decay(
        self,
        var_list: Sequence[Any] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Exclude variables from the weight decay of the inner optimizer."""
        check_excluded(var_list or ())
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        config = super().get_config()
        for name in _OF_THE_INNER:
            del config[name]
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return config | {"inner_optimizer": inner}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "Wrapper":
        """Return an optimizer of what `get_config` returned."""
        inner = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        return cls(**config | {"inner_optimizer": inner})
