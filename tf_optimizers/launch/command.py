"""Checks that workers can run a command, and can run it from here."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

USAGE = (
    "python -m tf_optimizers.launch --workers N [option ...] "
    "{script.py | -m module} [argument ...]"
)


def problem_of_environment() -> str | None:
    """Return why workers cannot be started from here, or None."""
    if os.name != "posix":
        return f"needs Linux or macOS. Received: {sys.platform}."
    if os.environ.get("TF_CONFIG"):
        return (
            "`TF_CONFIG` must not be set, since each worker gets its own. "
            f"Received: TF_CONFIG={os.environ['TF_CONFIG']!r}. Unset it, or "
            "start the script without the launcher to use it."
        )
    return None


def problem_of_command(command: list[str]) -> str | None:
    """Return what is wrong with the command, or None."""
    if command in ([], ["-m"]):
        return (
            "a script or `-m module` must follow the options. Received: "
            f"{' '.join(command) or 'neither'}. Usage: {USAGE}"
        )
    if command[0] == "-m":
        if not is_runnable_module(command[1]):
            return (
                "the module must be one that `python -m` can run from this "
                f"folder. Received: -m {command[1]}. Check its name, and that "
                "a package has a `__main__.py`."
            )
    elif not os.path.isfile(command[0]):
        found = "is a folder" if os.path.isdir(command[0]) else "does not exist"
        return (
            f"the script must be a file. Received: {command[0]}, which {found}."
            " Check the path, or write `-m` in front of a module's name."
        )
    elif not os.access(command[0], os.R_OK):
        return (
            f"the script must be readable. Received: {command[0]}. "
            f"Try `chmod +r {command[0]}`."
        )
    return None


def is_runnable_module(name: str) -> bool:
    """Return whether `python -m name` finds a module, without importing any."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return False
    try:
        spec = importlib.util.find_spec(parts[0])
    except ValueError:  # A module without a spec, such as `__main__`.
        return False
    for depth in range(2, len(parts) + 1):
        spec = _child(spec, ".".join(parts[:depth]))
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _child(spec, name + ".__main__")
    return spec is not None


def _child(parent: ModuleSpec | None, name: str) -> ModuleSpec | None:
    if parent is None or parent.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(name, parent.submodule_search_locations)
