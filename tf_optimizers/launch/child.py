"""Checks a command, and runs what the launcher starts."""

import importlib.util
import os
import runpy
import signal
import sys
import types
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

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


def watch() -> None:
    """Kill all worker groups that are left when the launcher is gone.

    Stdin is the lifeline. Every worker writes `+pid` to it at its start. The
    launcher writes `-pid` once that worker's group has ended, since the system
    may then give the number to another process. Stdin ends when the launcher
    has ended, in whatever way, and every worker has written its line.
    """
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        change = groups.add if line.startswith(b"+") else groups.discard
        change(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # It has ended, or the number is another user's by now.


def work(lifeline: int, devices: int, command: list[str]) -> None:
    """Become the process that `python *command` would be."""
    # Before any of the user's code, so that the watchdog misses no process.
    os.write(lifeline, b"+%d\n" % os.getpid())
    os.close(lifeline)
    if devices == 1:
        os.execv(sys.executable, [sys.executable, "-u", *command])
    is_module = command[0] == "-m"
    sys.argv = command[1:] if is_module else command
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        script_folder = os.path.dirname(os.path.realpath(command[0]))
        sys.path[0] = os.getcwd() if is_module else script_folder
    split_cpu(devices)
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        run_script(command[0])


def split_cpu(devices: int) -> None:
    """Give TensorFlow `devices` logical CPUs, before any tensor exists."""
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration() for _ in range(devices)],
    )


def run_script(path: str) -> None:
    """Run a script as Python does: `sys.argv[0]` as given, `__file__` absolute.

    `runpy.run_path` makes the two equal. It also removes `__main__` at the
    script's end, when its threads and exit handlers may still need it.
    """
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    loader = SourceFileLoader("__main__", main.__file__)
    main.__loader__ = loader
    sys.modules["__main__"] = main
    source = loader.get_data(main.__file__)
    exec(loader.source_to_code(source, main.__file__), main.__dict__)


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        watch()
    else:
        work(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
