"""Parses the launcher's command line."""

import argparse
import functools
import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from tf_optimizers.launch.command import (
    USAGE,
    problem_of_command,
    problem_of_environment,
)
from tf_optimizers.launch.group import launch, reserve_addresses


def main() -> int:
    """Run the workers to their end; return the exit code."""
    open_standard_streams()
    return launch(**vars(parse(sys.argv[1:])))


def open_standard_streams() -> None:
    """Open standard streams that the caller has closed, on `os.devnull`.

    Otherwise what is opened next, such as a pipe, would get their numbers.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options, or exit with a message and code 2."""
    parser = make_parser()
    own, command = split(arguments)
    options = parser.parse_args(own, argparse.Namespace(command=command))
    problem = problem_of_environment() or problem_of_command(command)
    if problem:
        parser.error(problem)
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's own options."""
    parser = argparse.ArgumentParser(
        prog="python -m tf_optimizers.launch",
        usage=USAGE,
        description="Run a script or module in several worker processes, "
        "with TF_CONFIG set. See `pydoc tf_optimizers.launch` for more.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workers",
        type=_count,
        required=True,
        metavar="N",
        help="worker processes",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=_count,
        default=1,
        metavar="M",
        help="logical CPU devices of each worker (%(default)s)",
    )
    parser.add_argument(
        "--host",
        type=_host,
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address of this machine, for TF_CONFIG (%(default)s)",
    )
    parser.add_argument(
        "--grace-period",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="time between SIGTERM or SIGINT and SIGKILL (%(default)g)",
    )
    parser.add_argument(
        "--max-restarts",
        type=functools.partial(_count, minimum=0),
        default=0,
        metavar="K",
        help="how often to restart all workers when one fails (%(default)s)",
    )
    parser.add_argument(
        "--restart-pause",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="time before the first restart; doubles, up to 60 (%(default)g)",
    )
    return parser


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the launcher's own arguments, and the command after them.

    `argparse.REMAINDER` would take some of the script's options for the
    launcher's, and drop a `--`.
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
        hint = "Start with one per core." if minimum else "0 means never."
        raise argparse.ArgumentTypeError(
            f"must be an integer of at least {minimum}. Received: {text}. "
            f"{hint}"
        )
    return count


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(
            "must be a finite number of seconds >= 0. "
            f"Received: {text}. Leave it out for the default."
        )
    return seconds


def _host(text: str) -> str:
    try:
        with ExitStack() as stack:
            reserve_addresses(text, 1, stack)
    except (OSError, UnicodeError) as error:
        raise argparse.ArgumentTypeError(
            f"must be an address of this machine. Received: {text} ({error}). "
            "Leave it out for 127.0.0.1."
        ) from error
    return text


if __name__ == "__main__":
    sys.exit(main())
