"""Private names of TensorFlow about what checkpoints call an object's parts."""

from typing import Any

# What Keras calls the list of an optimizer's variables.
VARIABLES = "_variables"


class CheckpointHooks:
    """Gives an optimizer's variables a name that says what they mean.

    A mixin; subclasses implement `_variables_name` and `_check_name`.
    """

    @property
    def _variables_name(self) -> str:
        """What checkpoints call the list of variables."""
        return VARIABLES

    def _check_name(self, name: str) -> None:
        """Raise if what a checkpoint has by a name is not to be read."""

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        # Names of what is written come from here; there is no public way to
        # give an attribute another one.
        children = super()._trackable_children(  # type: ignore[misc]
            save_type, **kwargs
        )
        if save_type == "checkpoint" and VARIABLES in children:
            children[self._variables_name] = children.pop(VARIABLES)
        return children

    def _lookup_dependency(
        self, name: str, cached_dependencies: dict[str, Any] | None = None
    ) -> Any:
        # What is read asks here for each name in the checkpoint, before any
        # value is restored, and then hands the children over.
        if cached_dependencies:
            self._check_name(name)
        return super()._lookup_dependency(  # type: ignore[misc]
            name, cached_dependencies
        )
