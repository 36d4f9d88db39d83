"""Excludes variables from weight decay, and finds them again after loading.

Loading a model may change the paths of its variables. Before version 3.16,
Keras drops the model's name, so `sequential/dense/kernel` becomes
`dense/kernel`. A subclassed model creates its layers again, so layers that the
user did not name get other numbers: `dense_1` may become `dense_3`.

Loading does not change the order of the variables, their shapes or, apart from
a number at the end, the last parts of their paths. So the config of a built
optimizer contains the positions of the excluded variables. To detect a
different model, the config also contains the shape and the last part of the
path of every variable. Before the optimizer is built, the config contains the
paths and shapes of the variables that the user passed to
`exclude_from_weight_decay()`.
"""

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from tf_optimizers._compat.keras_internals import path_of, variable_key
from tf_optimizers.checks import check_non_negative, check_patterns

# Biases, and the scales and offsets of normalization layers.
BIAS_AND_NORM = (r"bias$", r"(^|/)(beta|gamma|scale)$")

# Remedies for an exclusion that does not fit the model.
_BUILD = (
    "Call `optimizer.build(model.trainable_variables)` before you save the "
    "config."
)
_NEW = "For a different model, create a new optimizer."

# The purposes of exclusions: computations that can leave out a variable.
WEIGHT_DECAY, LAYER_ADAPTATION = "weight_decay", "layer_adaptation"

# The key of the exclusions in a config. Their dictionary has the keys `_ALL`,
# `_CHOSEN` and purposes, or only `_PATHS` if the optimizer was not built yet.
ENTRY = "excluded_variables"
# The name of the patterns, as an argument and in a config.
PATTERNS = "exclude_from_weight_decay"
_ALL, _CHOSEN, _PATHS = "variables", "chosen", "paths"


@dataclasses.dataclass(frozen=True)
class Excluded:
    """The excluded variables of a built optimizer.

    Args:
        labels: For each variable, the last part of its path, and its shape.
            They are recorded when the optimizer is built, because an inner
            optimizer's variables may have the model's paths only in `build`.
        chosen: The positions of the variables that the user passed to
            `exclude_from_weight_decay()`, or that a wrapper excludes.
        by_patterns: For each purpose, such as "weight_decay", the patterns and
            the positions of the variables that match. Purposes without patterns
            are left out.
        by_wrapper: The positions in `chosen` that only a wrapper excludes. The
            wrapper's config saves them.
    """

    labels: Sequence[str] = ()
    chosen: AbstractSet[int] = frozenset()
    by_patterns: Mapping[str, tuple[Sequence[str], AbstractSet[int]]] = (
        dataclasses.field(default_factory=dict)
    )
    by_wrapper: AbstractSet[int] = frozenset()

    def has(self, purpose: str, index: int) -> bool:
        """Return whether patterns exclude the variable at `index`.

        `purpose` is the computation that leaves out the variable, such as
        "weight_decay".
        """
        return index in self.by_patterns.get(purpose, ((), ()))[1]

    def entry(self) -> dict[str, Any]:
        """Return the exclusions for a config; empty if there are none."""
        own = self.chosen - self.by_wrapper
        if not own and not self.by_patterns:
            return {}
        return {
            _ALL: list(self.labels),
            _CHOSEN: sorted(own),
            **{
                purpose: [list(patterns), sorted(found)]
                for purpose, (patterns, found) in self.by_patterns.items()
            },
        }


@dataclasses.dataclass(frozen=True)
class Exclusions:
    """The exclusions from weight decay that a user has specified.

    Args:
        patterns: None or regular expressions, matched anywhere in
            `variable.path`.
        names: Patterns for paths, from the `var_names` that the user passed to
            `exclude_from_weight_decay()`.
        variables: The path and shape of each variable passed to that method, by
            its `variable_key`.
        saved: The exclusions in the config from which the optimizer was
            created.
        masters: The keys of the variables' master weights; see `with_masters`.
    """

    patterns: Sequence[str] | None = None
    names: Sequence[str] = ()
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    saved: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    masters: Sequence[str] = dataclasses.field(default=(), compare=False)

    def with_call(
        self, optimizer: Any, variables: Any, names: Sequence[str] | None
    ) -> "Exclusions":
        """Return the exclusions after a call to `exclude_from_weight_decay()`.

        Raises:
            TypeError: If `names` is not a sequence of strings.
            ValueError: If `names` has an invalid regular expression.
            RuntimeError: If the optimizer is built, unless this call repeats
                the last call before the build.
        """
        found = Exclusions(
            self.patterns,
            tuple(map(_in_name, check_patterns("var_names", names) or ())),
            {variable_key(optimizer, v): _description(v) for v in variables},
        )
        # Accept the same exclusions again: a step in `strategy.run` may make
        # this call each time it runs, but the first run builds the optimizer.
        if optimizer.built and found != self:
            loaded = ", on a loaded optimizer, which keeps its exclusions"
            state = loaded if self.saved else ""
            instead = f", or pass `{PATTERNS}` to the constructor"
            arguments = inspect.signature(type(optimizer)).parameters
            raise RuntimeError(
                f"`{PATTERNS}()` must be called before the optimizer is built. "
                f"Received: a call after `build`{state}. Call the method on a "
                f"new optimizer{instead if PATTERNS in arguments else ''}."
            )
        return found

    def with_masters(
        self, optimizer: Any, masters: Mapping[str, Any]
    ) -> "Exclusions":
        """Return exclusions that include master weights of `variables`.

        `masters` maps a variable's key to its master weight.
        """
        found = [masters[key] for key in self.variables if key in masters]
        keys = [variable_key(optimizer, master) for master in found]
        return dataclasses.replace(self, masters=keys)

    def as_patterns(self) -> list[str] | None:
        """Return all patterns, including those from `var_names`."""
        if self.patterns is None and not self.names:
            return None
        return [*(self.patterns or ()), *self.names]

    def find(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        others: Mapping[str, Sequence[str] | None],
    ) -> Excluded:
        """Return the excluded variables of an optimizer.

        Args:
            optimizer: An optimizer that is not built yet.
            variables: The variables that the optimizer will be built with.
            others: Patterns for purposes other than weight decay.

        Raises:
            ValueError: If the exclusions in the config do not fit `variables`.
        """
        patterns = {WEIGHT_DECAY: self.as_patterns(), **others}
        by_patterns = {
            purpose: (each, self._found(purpose, each, variables))
            for purpose, each in patterns.items()
            if each
        }
        excluded = {*self.variables, *self.masters}
        chosen = self._chosen_when_saved(variables) | {
            i
            for i, variable in enumerate(variables)
            if variable_key(optimizer, variable) in excluded
        }
        return Excluded(_labels(variables), chosen, by_patterns)

    def _found(
        self, purpose: str, patterns: Sequence[str], variables: Sequence[Any]
    ) -> set[int]:
        """Return the positions of variables that match patterns.

        Loading a model may change paths. So if the patterns and variables are
        those of the saved config, return the positions in the config.
        """
        saved_patterns, found = self.saved.get(purpose, (None, ()))
        if saved_patterns == list(patterns) and self._was_saved_with(variables):
            return set(found)
        paths = list(map(path_of, variables))
        # Loading may drop the model's name, so a pattern may match a path with
        # or without this name.
        pairs = list(zip(paths, _without_model(paths), strict=True))
        return {
            i
            for i, pair in enumerate(pairs)
            for pattern in patterns
            if any(re.search(pattern, path) for path in pair)
        }

    def _chosen_when_saved(self, variables: Sequence[Any]) -> set[int]:
        """Return the positions of variables that a saved config excludes.

        These are the variables that the user passed to
        `exclude_from_weight_decay()`, not the matches of patterns.
        """
        saved = self.saved
        if not saved.get(_CHOSEN):
            return {
                _find(path, shape, variables)
                for path, shape in saved.get(_PATHS, ())
            }
        if self._was_saved_with(variables):
            return set(saved[_CHOSEN])
        expected = [saved[_ALL][i] for i in saved[_CHOSEN]]
        raise _not_found(
            ", which must have the config's variables in the same order",
            f"{expected}, a config with the variables {saved[_ALL]}, and a "
            f"model with the variables {_labels(variables)}",
            _NEW,
        )

    def _was_saved_with(self, variables: Sequence[Any]) -> bool:
        return self.saved.get(_ALL) == _labels(variables)

    def config(self, excluded: Excluded) -> dict[str, Any]:
        """Return the part of an optimizer's config that describes exclusions.

        Args:
            excluded: The result of `find`, or `Excluded()` before the
                optimizer is built.
        """
        entry = self.saved
        if excluded.labels:
            entry = excluded.entry()
        elif self.variables:
            entry = {_PATHS: sorted(map(list, self.variables.values()))}
        patterns = self.as_patterns()
        config: dict[str, Any] = {PATTERNS: patterns}
        return config | ({ENTRY: entry} if entry else {})


def check_exclusions(
    patterns: Sequence[str] | None, others: dict[str, Any]
) -> Exclusions:
    """Check `exclude_from_weight_decay`, and return the exclusions.

    Args:
        patterns: The value of `exclude_from_weight_decay`.
        others: The constructor's other arguments. This function removes the
            saved exclusions, which come from a config.
    """
    saved = others.pop(ENTRY, None) or {}
    patterns = check_patterns(PATTERNS, patterns)
    return Exclusions(patterns, saved=saved)


def check_weight_decay(value: float | None) -> float:
    """Check `weight_decay`, and return it as a float; None becomes 0."""
    return check_non_negative("weight_decay", 0.0 if value is None else value)


# Matches an escaped character, a character set, or the anchor ^.
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\^", re.DOTALL)


def _in_name(pattern: str) -> str:
    """Restrict a pattern to the part of a path after the last slash."""
    flags = "".join(re.findall(r"^(?:\(\?[aiLmsux]+\))+", pattern))
    body = _TOKENS.sub(
        lambda found: "(?<![^/])" if found[0] in ("^", r"\A") else found[0],
        pattern.removeprefix(flags),
    )
    # Flags such as (?i) must come first. The lookahead restricts matches to the
    # last part of the path.
    return rf"{flags}(?:^|/)(?=[^/]*$).*?(?:{body})"


def _description(variable: Any) -> tuple[str, str]:
    return path_of(variable), str(tuple(variable.shape))


def _labels(variables: Sequence[Any]) -> list[str]:
    """Return labels: the last part of each variable's path, and its shape.

    A label omits a number at the end of the path. For example, the label of
    `dense/kernel_1` is "kernel (3, 4)".
    """
    return [
        f"{re.sub(r'_[0-9]+$', '', path.rpartition('/')[2])} {shape}"
        for path, shape in map(_description, variables)
    ]


def _without_model(paths: Sequence[str]) -> list[str]:
    """Drop the model's name from paths if all paths begin with this name."""
    rests = [path.partition("/")[2] for path in paths]
    names = {path.partition("/")[0] for path in paths}
    # Guess from the depth: `dense/kernel` begins with a layer's name, and
    # `model/dense/kernel` with a model's name. If the only layer contains
    # layers (`lstm/lstm_cell/kernel`), it also counts as a model.
    is_model = len(names) == 1 and any("/" in rest for rest in rests)
    return rests if is_model else list(paths)


def _find(path: str, shape: str, variables: Sequence[Any]) -> int:
    """Return the position of the variable with a saved path and shape."""
    paths = list(map(path_of, variables))
    found = [
        i
        for i, described in enumerate(map(_description, variables))
        if described == (path, shape)
        or path not in paths
        and shape == described[1]
        and _differ_by_model(path, described[0])
    ]
    if len(found) == 1:
        return found[0]
    there = f"for a model with the variables {paths}"
    if found:
        there = f"which fits several variables: {[paths[i] for i in found]}"
    raise _not_found(
        " exactly once" if found else "",
        f"{path!r} of shape {shape}, {there}",
        _BUILD if found else f"{_BUILD} {_NEW}",
    )


def _differ_by_model(path: str, other: str) -> bool:
    """Return whether two paths are equal, except for leading names of one."""
    one, two = f"/{path}", f"/{other}"
    return one.endswith(two) or two.endswith(one)


def _not_found(where: str, received: str, remedy: str) -> ValueError:
    return ValueError(
        "Variables that an optimizer's config excludes from weight decay must "
        f"be in the model{where}. Received: an exclusion of {received}. "
        f"{remedy}"
    )
