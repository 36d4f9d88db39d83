"""Checks arguments."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# The smallest normal float32. Kernels may flush smaller numbers to zero.
TINY = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


class Fixed:
    """A descriptor for an attribute that only the constructor may set.

    A later assignment would have no effect, or only a partial effect: the
    constructor or `build` has already used the value, or the optimizer does not
    support the argument.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        """Remember the name of the attribute."""
        self._name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        """Return the value."""
        if optimizer is None:
            return self
        if self._name not in vars(optimizer):
            raise AttributeError(self._name)
        return vars(optimizer)[self._name]

    def __set__(self, optimizer: Any, value: Any) -> None:
        """Set the value; raise if it is set already."""
        if self._name in vars(optimizer):
            raise RuntimeError(
                f"`{self._name}` of an optimizer must not change. Received: "
                f"{self._name}={value!r}, assigned to an existing "
                f"`{type(optimizer).__name__}`. Create a new optimizer."
            )
        vars(optimizer)[self._name] = value


def check_number(
    name: str,
    value: Any,
    rule: str,
    is_valid: Callable[[float], bool],
) -> float:
    """Return `value` as a finite float, or raise an error stating `rule`."""
    message = f"`{name}` must be {rule}. Received: {name}={value!r}."
    if isinstance(value, (bool, np.bool_)) or not _is_scalar(value):
        raise TypeError(message)
    try:
        number = float(value)
    except OverflowError:  # An int can be too large for a float.
        number = math.inf
    if not (math.isfinite(number) and is_valid(number)):
        raise ValueError(message)
    return number


def check_non_negative(name: str, value: Any) -> float:
    """Return `value` as a finite float >= 0."""
    return check_number(name, value, "a finite number >= 0", lambda x: x >= 0)


def check_positive(name: str, value: Any) -> float:
    """Return `value` as a finite float > 0."""
    return check_number(name, value, "a finite number > 0", lambda x: x > 0)


def check_decay_rate(name: str, value: Any) -> float:
    """Return `value` as a float in [0, 1)."""
    return check_number(name, value, "a number in [0, 1)", lambda x: 0 <= x < 1)


def check_fraction(name: str, value: Any) -> float:
    """Return `value` as a float in [0, 1]."""
    return check_number(
        name, value, "a number in [0, 1]", lambda x: 0 <= x <= 1
    )


def check_epsilon(name: str, value: Any) -> float:
    """Return `value` as a positive float in float32's normal range."""
    return check_number(
        name,
        value,
        f"a number in float32's normal range ({TINY:.2g} to {_LARGEST:.2g})",
        lambda x: TINY <= x <= _LARGEST,
    )


def check_integer(name: str, value: Any, minimum: int) -> int:
    """Return `value` as an int of at least `minimum`."""
    message = (
        f"`{name}` must be an integer >= {minimum}. Received: {name}={value!r}."
    )
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(message)
    if value < minimum:
        raise ValueError(message)
    return int(value)


def check_boolean(name: str, value: Any) -> bool:
    """Return `value` as a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"`{name}` must be True or False. Received: {name}={value!r}."
        )
    return bool(value)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value` if it is among `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, choices))}. "
            f"Received: {name}={value!r}."
        )
    return value


def check_unsupported(
    owner: str, arguments: dict[str, Any], hints: dict[str, str]
) -> None:
    """Raise if an argument of Keras's base class is given but not supported.

    Args:
        owner: The name of the optimizer's class, for the error.
        arguments: The received keyword arguments.
        hints: For each unsupported argument, the advice for the error.
    """
    for name, hint in hints.items():
        if arguments.get(name) is not None:
            raise ValueError(
                f"`{owner}` does not support `{name}`. Received: "
                f"{name}={arguments[name]!r}. {hint}"
            )


def check_patterns(name: str, value: Any) -> list[str] | None:
    """Return valid regular expressions as a list, or None for None."""
    if value is None:
        return None
    if (
        isinstance(value, (str, bytes))
        or not isinstance(value, Sequence)
        or not all(isinstance(pattern, str) for pattern in value)
    ):
        raise TypeError(
            f"`{name}` must be None or a sequence of regular expressions, "
            f'such as ["bias"]. Received: {name}={value!r}.'
        )
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"`{name}` must contain valid regular expressions. Received: "
                f"{pattern!r} ({error}). Escape literal text with `re.escape`."
            ) from error
    return list(value)


def check_built(optimizer: Any, method: str) -> None:
    """Raise if a method is called before its optimizer is built."""
    if not optimizer.built:
        raise RuntimeError(
            f"`{method}()` needs a built optimizer. Received: an optimizer "
            f"that is not built. Call `{method}()` after the first `fit`, or "
            "after `optimizer.build(model.trainable_variables)`."
        )


def check_learning_rate(value: Any) -> Any:
    """Return a number as a float, and a schedule or a callable unchanged."""
    if isinstance(value, (tf.Variable, keras.Variable)):
        raise TypeError(
            "`learning_rate` must be a number, a `LearningRateSchedule` or a "
            f"callable. Received: learning_rate={value!r}, a variable. Pass "
            "`lambda: variable` to read the variable in every step, or "
            "`float(variable)` to read it once."
        )
    if callable(value):
        return value
    return check_number(
        "learning_rate",
        value,
        "a finite number >= 0, a `LearningRateSchedule` or a callable",
        lambda x: x >= 0,
    )


def check_base_arguments(arguments: dict[str, Any]) -> None:
    """Check the base class's arguments, and convert their types in place.

    Keras silently ignores a `clipnorm` <= 0, and detects some wrong types only
    in the first step.
    """
    clipping = ("clipnorm", "clipvalue", "global_clipnorm")
    for name in (*clipping, "loss_scale_factor"):
        if arguments.get(name) is not None:
            arguments[name] = check_positive(name, arguments[name])
    for name, minimum in (
        ("gradient_accumulation_steps", 2),
        ("ema_overwrite_frequency", 1),
    ):
        if arguments.get(name) is not None:
            arguments[name] = check_integer(name, arguments[name], minimum)
    if "use_ema" in arguments:
        arguments["use_ema"] = check_boolean("use_ema", arguments["use_ema"])
    if "ema_momentum" in arguments:
        arguments["ema_momentum"] = check_fraction(
            "ema_momentum", arguments["ema_momentum"]
        )
    if not isinstance(arguments.get("name"), (str, type(None))):
        raise TypeError(
            "`name` must be a string or None. "
            f"Received: name={arguments['name']!r}."
        )


def _is_scalar(value: Any) -> bool:
    """Return whether `value` is a real number or a concrete 0-d tensor."""
    if isinstance(value, (int, float, np.number)):
        return not isinstance(value, np.complexfloating)
    if isinstance(value, np.ndarray):
        return value.ndim == 0 and value.dtype.kind in "iuf"
    is_real = tf.is_tensor(value) and (
        value.dtype.is_floating or value.dtype.is_integer
    )
    return is_real and hasattr(value, "numpy") and value.shape.rank == 0
