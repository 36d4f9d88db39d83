"""Which variables are decayed: patterns, and Keras's own method."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tf_optimizers._compat.keras import path_of
from tf_optimizers.checks import check_non_negative, check_patterns

# Biases, and scales and offsets of normalization, by the last part of a path.
BIAS_AND_NORM = (r"bias$", r"(^|/)(beta|gamma|scale)$")


@dataclasses.dataclass(frozen=True)
class Exclusions:
    """The variables that are not decayed.

    Args:
        patterns: None or regular expressions, searched in `variable.path`.
        names: Patterns from a call of `exclude_from_weight_decay()`.
        variables: Patterns of the single variables of that call, by their keys.
    """

    patterns: Sequence[str] | None = None
    names: Sequence[str] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def with_call(
        self, variables: Mapping[str, Any], names: Sequence[str] | None
    ) -> "Exclusions":
        """Return the exclusions after a call; `variables` are by their keys."""
        return Exclusions(
            self.patterns,
            tuple(map(_in_path, check_patterns("var_names", names) or ())),
            {
                key: f"^{re.escape(path_of(variable))}$"
                for key, variable in variables.items()
            },
        )

    def has(self, variable: Any, key: str) -> bool:
        """Return whether a pattern or a call excludes a variable."""
        patterns = [*(self.patterns or ()), *self.names]
        return key in self.variables or is_match(patterns, variable)

    def as_patterns(self) -> list[str] | None:
        """Return equivalent patterns, for a config."""
        by_call = [*self.names, *self.variables.values()]
        if self.patterns is None and not by_call:
            return None
        return [*(self.patterns or ()), *by_call]


def check_exclusions(patterns: Sequence[str] | None) -> Exclusions:
    """Return what the argument `exclude_from_weight_decay` excludes."""
    return Exclusions(check_patterns("exclude_from_weight_decay", patterns))


def check_weight_decay(value: float | None) -> float:
    """Return a decay as a float; None means 0."""
    return check_non_negative("weight_decay", 0.0 if value is None else value)


# An escaped character, a set, or an anchor.
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\^", re.DOTALL)


def is_match(patterns: Sequence[str], variable: Any) -> bool:
    """Return whether any of `patterns` is found in the variable's path."""
    path = path_of(variable)
    return any(re.search(pattern, path) for pattern in patterns)


def _in_path(pattern: str) -> str:
    """Return a pattern that searches a path after its last slash."""
    flags = "".join(re.findall(r"^(?:\(\?[aiLmsux]+\))+", pattern))
    body = _PARTS.sub(
        lambda found: "(?:^|(?<=/))" if found[0] == "^" else found[0],
        pattern.removeprefix(flags),
    )
    return f"{flags}(?:{body})[^/]*$"  # Flags must come first.
