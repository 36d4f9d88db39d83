"""Which variables are decayed: patterns, and Keras's own method."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tf_optimizers._compat.keras import variable_key
from tf_optimizers.base import known_again
from tf_optimizers.base.known_again import Excluded
from tf_optimizers.checks import check_non_negative, check_patterns

# Biases, and scales and offsets of normalization, by the last part of a path.
BIAS_AND_NORM = (r"bias$", r"(^|/)(beta|gamma|scale)$")

# What exclusions are for.
WEIGHT_DECAY, LAYER_ADAPTATION = "weight_decay", "layer_adaptation"


@dataclasses.dataclass(frozen=True)
class Exclusions:
    """The variables that are not decayed, and others that patterns exclude.

    Args:
        patterns: None or regular expressions, searched in `variable.path`.
        names: Patterns from a call of `exclude_from_weight_decay()`.
        variables: Descriptions of the single variables of that call, by key.
        saved: What a config says of another optimizer's variables.
    """

    patterns: Sequence[str] | None = None
    names: Sequence[str] = ()
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    saved: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def with_call(
        self, variables: Mapping[str, Any], names: Sequence[str] | None
    ) -> "Exclusions":
        """Return the exclusions after a call; `variables` are by their keys."""
        return Exclusions(
            self.patterns,
            tuple(map(_in_name, check_patterns("var_names", names) or ())),
            {
                key: known_again.description(variable)
                for key, variable in variables.items()
            },
        )

    def as_patterns(self) -> list[str] | None:
        """Return the patterns, those of names too, for a config."""
        if self.patterns is None and not self.names:
            return None
        return [*(self.patterns or ()), *self.names]

    def find(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        others: Mapping[str, Sequence[str] | None],
    ) -> Excluded:
        """Return which of an optimizer's variables are excluded.

        Args:
            optimizer: Not built yet.
            variables: That it will be built with.
            others: Patterns for other purposes than weight decay.

        Raises:
            ValueError: If a config excludes variables that are not here.
        """
        patterns = {WEIGHT_DECAY: self.as_patterns(), **others}
        by_patterns = {
            purpose: (each, self._found(purpose, each, variables))
            for purpose, each in patterns.items()
            if each
        }
        chosen = known_again.chosen(self.saved, variables) | {
            i
            for i, variable in enumerate(variables)
            if variable_key(optimizer, variable) in self.variables
        }
        return Excluded(variables, chosen, by_patterns)

    def _found(
        self, purpose: str, patterns: Sequence[str], variables: Sequence[Any]
    ) -> set[int]:
        """Return the positions of what patterns exclude, here or when saved."""
        saved = known_again.recorded(self.saved, purpose, patterns, variables)
        if saved is not None:
            return saved
        return known_again.search(patterns, variables)

    def config(self, excluded: Excluded) -> dict[str, Any]:
        """Return patterns, and which variables these and calls exclude.

        Args:
            excluded: What `find` has returned; of no variables before that.
        """
        entry = self.saved
        if excluded.variables:
            entry = excluded.entry()
        elif self.variables:
            entry = known_again.entry_of_chosen(self.variables.values())
        patterns = self.as_patterns()
        config: dict[str, Any] = {"exclude_from_weight_decay": patterns}
        return config | ({known_again.ENTRY: entry} if entry else {})


def check_exclusions(
    patterns: Sequence[str] | None, others: dict[str, Any]
) -> Exclusions:
    """Return what the argument `exclude_from_weight_decay` excludes.

    A config may say more of it, in an entry that is removed from `others`.
    """
    saved = others.pop(known_again.ENTRY, None) or {}
    patterns = check_patterns("exclude_from_weight_decay", patterns)
    return Exclusions(patterns, saved=saved)


def check_weight_decay(value: float | None) -> float:
    """Return a decay as a float; None means 0."""
    return check_non_negative("weight_decay", 0.0 if value is None else value)


# An escaped character, a set, or an anchor.
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\^", re.DOTALL)


def _in_name(pattern: str) -> str:
    """Return a pattern that searches a path after its last slash."""
    flags = "".join(re.findall(r"^(?:\(\?[aiLmsux]+\))+", pattern))
    body = _PARTS.sub(
        lambda found: "(?<![^/])" if found[0] in ("^", r"\A") else found[0],
        pattern.removeprefix(flags),
    )
    # Flags must come first. What matches has no slash left to cross.
    return rf"{flags}(?:^|/)(?=[^/]*$).*?(?:{body})"
