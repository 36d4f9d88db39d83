"""Which variables are decayed: patterns, and Keras's own method."""

import re
from collections.abc import Sequence
from typing import Any

from tf_optimizers._compat.keras import variable_key
from tf_optimizers.base.optimizer import Optimizer
from tf_optimizers.base.replicas import path_of
from tf_optimizers.checks import check_non_negative, check_patterns

# Biases, and scales and offsets of normalisations, by the last part of a path.
BIAS_AND_NORM = (r"bias$", r"(^|/)(beta|gamma|scale)$")


class DecayedOptimizer(Optimizer):
    """An optimizer whose own mathematics decays weights, but for some.

    The decoupled decay of `keras.optimizers.Optimizer` is never applied.

    Args:
        learning_rate: See `Optimizer`.
        weight_decay: float >= 0; None means 0.
        exclude_from_weight_decay: None or a sequence of regular expressions,
            searched (`re.search`) in `variable.path`.
        **kwargs: See `keras.optimizers.Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Any,
        weight_decay: float | None,
        exclude_from_weight_decay: Sequence[str] | None,
        **kwargs: Any,
    ) -> None:
        weight_decay = check_non_negative(
            "weight_decay", 0.0 if weight_decay is None else weight_decay
        )
        patterns = check_patterns(
            "exclude_from_weight_decay", exclude_from_weight_decay
        )
        super().__init__(learning_rate, weight_decay=weight_decay, **kwargs)
        self._excluded_paths = patterns
        self._excluded_names: list[str] = []
        self._excluded_variables: dict[str, str] = {}

    def exclude_from_weight_decay(
        self,
        var_list: Sequence[Any] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Exclude variables, beside those that the patterns exclude.

        Unlike Keras's method of this name, what it excludes is part of the
        config. Each call replaces what the one before said. Every replica may
        make it.

        Args:
            var_list: Variables to exclude.
            var_names: Regular expressions searched in `variable.name`.

        Raises:
            RuntimeError: If the optimizer is built already, with others.
        """
        patterns = check_patterns("var_names", var_names) or []
        names = [_name_in_path(name) for name in patterns]
        variables = {
            variable_key(self, variable): f"^{re.escape(path_of(variable))}$"
            for variable in var_list or ()
        }
        said = self._excluded_names, self._excluded_variables
        # In `strategy.run` the first replica builds before the next one calls.
        if self.built and said != (names, variables):
            raise RuntimeError(
                "`exclude_from_weight_decay()` must be called before the "
                "optimizer is built. Received a call after `build`. Call it "
                "before the first `fit`, or pass `exclude_from_weight_decay` "
                "to the constructor."
            )
        self._excluded_names, self._excluded_variables = names, variables

    def _is_decayed(self, variable: Any) -> bool:
        """Tell whether no pattern and no call excludes `variable`."""
        patterns = [*(self._excluded_paths or ()), *self._excluded_names]
        return not (
            variable_key(self, variable) in self._excluded_variables
            or is_match(patterns, variable)
        )

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        by_method = [*self._excluded_names, *self._excluded_variables.values()]
        patterns = self._excluded_paths
        if patterns is not None or by_method:
            patterns = [*(patterns or ()), *by_method]
        return super().get_config() | {"exclude_from_weight_decay": patterns}


def _name_in_path(pattern: str) -> str:
    """Return a pattern for paths that searches behind their last slash."""
    start = "(^|/)" if pattern.startswith("^") else ""
    return f"{start}(?:{pattern.removeprefix('^')})[^/]*$"


def is_match(patterns: Sequence[str], variable: Any) -> bool:
    """Tell whether any of `patterns` is found in the variable's path."""
    path = path_of(variable)
    return any(re.search(pattern, path) for pattern in patterns)
