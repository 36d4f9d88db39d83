"""Parses and checks the launcher's command line."""

import argparse
import functools
import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from tf_optimizers.launch.gpus import divide_gpus
from tf_optimizers.launch.group import Job, launch, reserve_addresses
from tf_optimizers.launch.platforms import FINDERS, PORT, find_place

USAGE = (
    "python -m tf_optimizers.launch {--workers N | --cluster auto} "
    "[option ...] {script.py | -m module} [argument ...]"
)

# The default address of workers on one machine.
LOOPBACK = "127.0.0.1"


def check_options(options: argparse.Namespace) -> None:
    """Raise a ValueError if these options cannot be used here."""
    if os.name != "posix":
        raise ValueError(
            f"the launcher needs Linux or macOS. Received: {sys.platform}."
        )
    if options.standby is not None and not options.max_restarts:
        raise ValueError(
            "`--standby` must come with `--max-restarts`, since standby "
            "processes wait for a restart. Received: --standby "
            f"{options.standby:g} without restarts. Pass `--max-restarts 10` "
            "too, or leave `--standby` out."
        )
    if options.cluster is not None:
        if options.host is not None:
            raise ValueError(
                "`--host` must be left out with `--cluster`, which finds the "
                f"addresses. Received: --host {options.host}."
            )
        return
    if options.workers is None:
        raise ValueError(
            "`--workers` or `--cluster` must be given. Received: neither. Pass "
            "`--workers 2` to start two workers on this machine, or `--cluster "
            "auto` on every machine of a cluster."
        )
    for name in ("machines", "port"):
        value = getattr(options, name)
        if value is not None:
            raise ValueError(
                f"`--{name}` must come with `--cluster`. Received: --{name} "
                f"{value} without `--cluster`. Leave `--{name}` out to start "
                "workers on this machine."
            )
    if os.environ.get("TF_CONFIG"):
        raise ValueError(
            "`TF_CONFIG` must not be set without `--cluster`: the launcher "
            f"sets it. Received: TF_CONFIG={os.environ['TF_CONFIG']!r}. Unset "
            "it, or pass `--cluster tf-config` to use it."
        )


def use_environment(options: argparse.Namespace) -> None:
    """Replace the cluster and GPU options with fields of `Job`.

    An omitted number of workers, host or port gets its default.

    Raises:
        ValueError: If the environment does not fit the options.
    """
    options.workers = options.workers or 1
    options.host = options.host or LOOPBACK
    port = vars(options).pop("port") or PORT
    kind, machines = vars(options).pop("cluster"), vars(options).pop("machines")
    options.place = kind and find_place(kind, os.environ, machines)
    options.addresses, local, count = [], 0, 1
    if options.place:  # Raise before any worker starts.
        options.addresses = options.place.addresses(options.workers, port)
        options.place.check_ports(options.addresses)
        # Several launchers may share this machine.
        local, count = options.place.local_index, options.place.local_count
    each = vars(options).pop("gpus_per_worker")
    options.gpus = divide_gpus(options.workers, each, os.environ, local, count)


def check_command(command: list[str]) -> None:
    """Raise a ValueError if the command cannot be started."""
    if command in ([], ["-m"]):
        raise ValueError(
            "a script or `-m module` must follow the options. Received: "
            f"{' '.join(command) or 'neither'}. Usage: {USAGE}"
        )
    if command[0] == "-m":
        if not is_runnable_module(command[1]):
            raise ValueError(
                "`python -m` must be able to run the module from this folder. "
                f"Received: -m {command[1]}. Check its name. A package needs a "
                "`__main__.py`."
            )
    elif not os.path.isfile(command[0]):
        found = "is a folder" if os.path.isdir(command[0]) else "does not exist"
        raise ValueError(
            f"the script must be a file. Received: {command[0]}, which {found}."
            " Check the path, or write `-m` in front of a module's name."
        )
    elif not os.access(command[0], os.R_OK):
        raise ValueError(
            f"the script must be readable. Received: {command[0]}. "
            f"Try `chmod +r {command[0]}`."
        )


def is_runnable_module(name: str) -> bool:
    """Return whether `python -m name` finds a module; import no module."""
    parts = name.split(".")
    # `python -m __main__` fails, although this process has such a module.
    if name == "__main__" or not all(part.isidentifier() for part in parts):
        return False
    try:
        spec = importlib.util.find_spec(parts[0])
    except ValueError:  # An imported module without a spec.
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


def main() -> int:
    """Run the workers; return the launcher's exit code."""
    open_standard_streams()
    return launch(Job(**vars(parse(sys.argv[1:]))))


def open_standard_streams() -> None:
    """Open `os.devnull` for each standard stream that the caller has closed.

    Otherwise, the next file or pipe that Python opens would get the file
    descriptor of the closed stream.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; if they are wrong, exit with a message and code 2."""
    parser = make_parser()
    own, command = split(arguments)
    options = parser.parse_args(own, argparse.Namespace(command=command))
    try:
        check_options(options)
        check_command(command)
        use_environment(options)
    except ValueError as error:
        parser.error(str(error))
    return options


_HELP = {
    "workers": "number of workers of this launcher (1 with --cluster)",
    "cluster": "scheduler whose environment variables describe the cluster",
    "machines": "number of launchers, if the scheduler does not set it",
    "port": f"first port on every machine, with --cluster ({PORT})",
    "gpus-per-worker": "GPUs per worker (all, divided equally)",
    "devices-per-worker": "logical CPU devices per worker (%(default)s)",
    "host": f"address of this machine, for TF_CONFIG ({LOOPBACK})",
    "grace-period": "time from SIGTERM, SIGINT or SIGHUP until SIGKILL (30, or "
    "10 after a failure)",
    "max-restarts": "how many times to restart all workers if one fails "
    "(%(default)s)",
    "restart-pause": "time before the first restart; doubles, up to 60 "
    "(%(default)g)",
    "standby": "start standby processes this many seconds after the workers",
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's own options."""
    parser = argparse.ArgumentParser(
        prog="python -m tf_optimizers.launch",
        usage=USAGE,
        description="Run a script or module in several worker processes, "
        "with TF_CONFIG set. See `pydoc tf_optimizers.launch` for more.",
        allow_abbrev=False,
    )

    def add(name: str, **settings: Any) -> None:
        parser.add_argument(f"--{name}", help=_HELP[name], **settings)

    count_or_0 = functools.partial(_count, minimum=0)
    add("workers", type=_count, metavar="N")
    add("cluster", choices=["auto", *sorted(FINDERS)])
    add("machines", type=_count, metavar="K")
    add("port", type=_port, metavar="P")
    add("gpus-per-worker", type=count_or_0, metavar="G")
    add("devices-per-worker", type=_count, metavar="M", default=1)
    add("host", type=_host, metavar="ADDRESS")
    add("grace-period", type=_seconds, metavar="SECONDS")
    add("max-restarts", type=count_or_0, metavar="K", default=0)
    add("restart-pause", type=_seconds, metavar="SECONDS", default=0.1)
    add("standby", type=_seconds, metavar="SECONDS")
    return parser


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the launcher's own arguments, and the command after them.

    `argparse.REMAINDER` would parse some of the script's options as options of
    the launcher, and drop a `--`.
    """
    start = 0
    while start < len(arguments):
        argument = arguments[start]
        if argument in ("-m", "--") or not argument.startswith("-"):
            break
        alone = "=" in argument or argument in ("-h", "--help")
        start += 1 if alone else 2
    command = list(arguments[start:])
    return list(arguments[:start]), command[command[:1] == ["--"] :]


def _count(text: str, minimum: int = 1) -> int:
    try:
        count = int(text)
    except ValueError:
        count = minimum - 1
    if count < minimum:
        hint = "Pass a number such as 2." if minimum else "Pass 0 for none."
        raise argparse.ArgumentTypeError(
            f"must be an integer of at least {minimum}. Received: {text}. "
            f"{hint}"
        )
    return count


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(
            f"must be an integer in [1, 65535]. Received: {text}. Omit the "
            "option to use the default."
        )
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(
            "must be a finite number of seconds >= 0. "
            f"Received: {text}. Omit the option to use the default."
        )
    return seconds


def _host(text: str) -> str:
    try:
        with ExitStack() as stack:
            reserve_addresses(text, 1, stack)
    except (OSError, UnicodeError) as error:
        raise argparse.ArgumentTypeError(
            f"must be an address of this machine. Received: {text}. Omit the "
            f"option to use 127.0.0.1. The system reported: {error}"
        ) from error
    return text


if __name__ == "__main__":
    sys.exit(main())
