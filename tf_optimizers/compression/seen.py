"""Which variables have been compressed, and whether a step may have others."""

from collections.abc import Iterable, Sequence
from typing import Any

from tf_optimizers._compat import Gradient
from tf_optimizers.base.gradients import as_dense


class Seen:
    """Remembers the variables whose gradients have been compressed.

    Args:
        name: The optimizer's class, for error messages.
        has_cool_down: Whether some step will send all that is left.
    """

    def __init__(self, name: str, has_cool_down: bool) -> None:
        self._name = name
        self._has_cool_down = has_cool_down
        self._indices: set[int] = set()

    def add(self, indices: Iterable[int]) -> None:
        """Remember variables of which something is held back already.

        As after a state was loaded: what is held back must be sent.
        """
        self._indices.update(indices)

    def densify(
        self,
        indices: Sequence[int],
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
    ) -> list[Gradient]:
        """Make rows dense if their variable has been compressed.

        What replicas have accumulated of it differs, and they would not make
        the same update of the same rows.
        """
        return [
            as_dense(gradient, variable) if i in self._indices else gradient
            for i, gradient, variable in zip(
                indices, gradients, variables, strict=True
            )
        ]

    def check(
        self, indices: list[int], paths: Sequence[str], is_all: bool
    ) -> None:
        """Refuse what would be sent twice, or not at all at the end.

        Args:
            indices: Of what a step compresses.
            paths: Of all variables.
            is_all: Whether the step exchanges others as well.
        """
        if len(set(indices)) < len(indices):
            twice = max(indices, key=indices.count)
            raise ValueError(
                f"`{self._name}` takes one gradient per variable. Received: "
                f"two of {paths[twice]}. Add them up, and pass their sum."
            )
        missing = self._indices.difference(indices)
        if missing and self._has_cool_down and not is_all:
            raise ValueError(
                "With a cool-down, all variables must have gradients in every "
                "step, since one of the steps sends all that is left. "
                f"Received: no gradient of {paths[min(missing)]}, of which "
                "there was one before. Pass `rampdown_begin_step=None` and "
                "`rampdown_step=1`, or use an optimizer for each set of "
                "variables."
            )
        self._indices |= set(indices)
