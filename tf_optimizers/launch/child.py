"""Runs a worker, or the guard of all workers, as a child of the launcher.

The launcher starts this file by its path, so that Python loads no other module
of the package before the script or a standby process imports it.
"""

import contextlib
import importlib
import os
import runpy
import signal
import sys
import types
from importlib.machinery import SourceFileLoader
from typing import NoReturn

# The modules that a standby process imports.
LIBRARIES = (
    *("tensorflow", "keras"),
    *("tf_optimizers.callbacks", "tf_optimizers.workers.strategy"),
)


def guard() -> None:
    """Once the launcher is gone, kill the process groups of its workers.

    Stdin is a pipe, the lifeline. Every worker first writes `+pid` to the pipe,
    then closes its end. The launcher writes `-pid` once that worker's group has
    ended, since the system may then reuse the pid. Stdin ends once the launcher
    and every worker have closed the pipe or ended.
    """
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        change = groups.add if line.startswith(b"+") else groups.discard
        change(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # The group has ended; its ID may be in use again.


def work(
    lifeline: int, devices: int, command: list[str], stands_by: bool = False
) -> None:
    """Run a script or module in this process, as `python` would.

    Args:
        lifeline: The file descriptor of the pipe to the guard.
        devices: The number of logical CPU devices.
        command: A script or `-m module`, followed by arguments.
        stands_by: Whether to import libraries first, and then to wait until the
            launcher needs this process.
    """
    # Register this process before the user's code can start other processes, so
    # that the guard can kill all of them.
    with contextlib.suppress(BrokenPipeError):  # The guard was killed.
        os.write(lifeline, b"+%d\n" % os.getpid())
    os.close(lifeline)
    if devices == 1 and not stands_by:
        run_in_new_python(devices, command)
    show_command(command)
    if stands_by:
        is_ready = import_libraries()
        wait_for_turn()
        if not is_ready:
            run_in_new_python(devices, command)
    run_here(devices, command)


def run_in_new_python(devices: int, command: list[str]) -> NoReturn:
    """Replace this process with a new Python that runs the command."""
    split = [__file__, "split", str(devices)] if devices > 1 else []
    os.execv(sys.executable, [sys.executable, "-u", *split, *command])


def show_command(command: list[str]) -> None:
    """Set `sys.argv` and `sys.path` as `python` would for the command."""
    is_module = command[0] == "-m"
    sys.argv = command[1:] if is_module else command
    if not getattr(sys.flags, "safe_path", False):  # Since Python 3.11.
        script_folder = os.path.dirname(os.path.realpath(command[0]))
        sys.path[0] = os.getcwd() if is_module else script_folder


def run_here(devices: int, command: list[str]) -> None:
    """Run the command in this process, after `show_command`."""
    if devices > 1:
        split_cpu(devices)
    if command[0] == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        run_script(command[0])


def import_libraries() -> bool:
    """Import `LIBRARIES`; return whether the command can use them."""
    try:
        for name in LIBRARIES:
            importlib.import_module(name)
    # For example, a library is not installed, or Keras has loaded another
    # backend. The command can still choose TensorFlow, but only in a new
    # process.
    except Exception:
        return False
    return True


def wait_for_turn() -> None:
    """Wait for a byte on stdin; exit if stdin ends without a byte.

    Stdin ends without a byte if the launcher has ended. After a byte, stdin
    becomes empty for the command.
    """
    if not os.read(0, 1):
        sys.exit()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def split_cpu(devices: int) -> None:
    """Split the CPU into logical devices, before any tensor exists."""
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration() for _ in range(devices)],
    )


def run_script(path: str) -> None:
    """Run a script as Python does, with an absolute path in `__file__`.

    `sys.argv[0]` stays as given. `runpy.run_path` would make the two paths
    equal. It would also replace `__main__` when the script ends, although the
    script's threads and exit handlers may still need this module.
    """
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    loader = SourceFileLoader("__main__", main.__file__)
    main.__loader__ = loader
    sys.modules["__main__"] = main
    source = loader.get_data(main.__file__)
    exec(loader.source_to_code(source, main.__file__), main.__dict__)


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        guard()
    elif sys.argv[1] == "split":
        _, _, count, *rest = sys.argv
        show_command(rest)
        run_here(int(count), rest)
    else:
        work(
            int(sys.argv[2]),
            int(sys.argv[3]),
            sys.argv[4:],
            stands_by=sys.argv[1] == "stand-by",
        )
