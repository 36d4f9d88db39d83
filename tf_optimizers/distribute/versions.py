"""The versions of packages that workers must have in common."""

import platform
import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_optimizers.distribute.agreement import check_alike


def versions() -> dict[str, str]:
    """Return a part of a statement, which is that of `check_versions`."""
    # It imports this module, which so must not import it.
    package = sys.modules[__name__.partition(".")[0]]
    # Of Python, the third number stands for mends only.
    return {
        "tf_optimizers": package.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def check_versions(statements: Sequence[dict[str, Any]]) -> None:
    """Raise on every worker unless all run the same versions."""
    names = versions()
    check_alike(
        "versions",
        [{name: each.get(name) for name in names} for each in statements],
        "Install the same versions on every machine.",
        "All workers must have the same versions of packages.",
    )
