"""Parses the command line of the demo, and runs the parts."""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tf_optimizers.demo.link import Link, LinkError, parse_link
from tf_optimizers.demo.parts import (
    FIRST_TUNING_SEED,
    PARTS,
    Settings,
    missing_extras,
)
from tf_optimizers.demo.probe import LoopbackError, check_loopback
from tf_optimizers.demo.processes import WorkersError
from tf_optimizers.demo.start import Parts, load_parts

DEFAULT_LINK = "100 Mbit/s, 20 ms"
DEFAULT_SEEDS = 8
QUICK_SEEDS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the process's exit code."""
    options = parse(arguments)
    missing = missing_extras()
    if missing:
        return fail(
            "The demo needs packages that are not installed. "
            f"Missing: {', '.join(missing)}. "
            'Run `pip install "tf_optimizers[demo]"`.'
        )
    try:
        if "gradient-compression" in options.parts:
            check_loopback()
        # Loading is slow, so do it after the checks.
        parts = load_parts(dict.fromkeys(options.parts))
        run(parts, options)
    except (LinkError, LoopbackError, WorkersError) as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def fail(message: str) -> int:
    """Print an error; return the exit code."""
    Console(stderr=True).print(message, markup=False)
    return 1


def run(parts: Parts, options: argparse.Namespace) -> None:
    """Run the parts that the command line names."""
    from tf_optimizers.demo.report import report_on

    with tempfile.TemporaryDirectory() as temporary:
        settings = Settings(
            seeds=options.seeds,
            first_seed=options.first_seed,
            link=options.link,
            quick=options.quick,
            data_dir=options.data_dir or Path(temporary),
            report_dir=options.report_dir,
        )
        report_on(parts, settings, Console())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with a message and code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tf_optimizers.demo",
        description="Train on real data, without a download, and report.",
    )
    parser.add_argument(
        "--report-dir",
        type=_folder,
        default="report",
        help="folder for report.md, its plots and results.json (%(default)s)",
    )
    parser.add_argument(
        "--seeds",
        type=_seeds,
        help="number of networks to train for each test accuracy, one per seed "
        f"({DEFAULT_SEEDS}; {QUICK_SEEDS} with --quick); gradient-compression "
        "trains at most 5 (2 with --quick)",
    )
    parser.add_argument(
        "--first-seed",
        type=_first_seed,
        default=0,
        help="the first seed; seeds set initial weights and the order of the "
        "data (%(default)s)",
    )
    parser.add_argument(
        "--link",
        type=_link,
        default=DEFAULT_LINK,
        help="the simulated link between the workers of gradient-compression, "
        'or none ("%(default)s")',
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="train less, only to check that the demo works",
    )
    parser.add_argument(
        "--data-dir",
        type=_folder,
        help="folder for the dataset, created if missing (a temporary folder)",
    )
    parser.add_argument(
        "--parts",
        type=_part,
        nargs="+",
        default=list(PARTS),
        metavar="PART",
        help=f"parts to run, any of: {', '.join(PARTS)} (all)",
    )
    options = parser.parse_args(arguments)
    if options.seeds is None:
        options.seeds = QUICK_SEEDS if options.quick else DEFAULT_SEEDS
    if options.first_seed + options.seeds > FIRST_TUNING_SEED:
        parser.error(
            "test seeds must differ from the seeds that tune learning rates, "
            f"which begin at {FIRST_TUNING_SEED}. Received: --first-seed "
            f"{options.first_seed}, with {options.seeds} seeds. Pass a smaller "
            "`--first-seed`, or leave it out for 0."
        )
    return options


def _folder(text: str) -> Path:
    """Create a folder, so that a bad path is an error before any work."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            "must be a folder that exists or can be created. "
            f"Received: {text} ({error.strerror}). Choose another path."
        ) from error
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"must be a writable folder. Received: {text}. Choose another path."
        )
    return path


def _seeds(text: str) -> int:
    try:
        seeds = int(text)
    except ValueError:
        seeds = 0
    if seeds < 2:
        raise argparse.ArgumentTypeError(
            "must be an integer of at least 2, to measure a spread. "
            f"Received: {text}. Leave `--seeds` out for the default."
        )
    return seeds


def _first_seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"must be an integer >= 0. Received: {text}. Omit `--first-seed` "
            "to use 0."
        )
    return int(text)


def _link(text: str) -> Link:
    try:
        return parse_link(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _part(text: str) -> str:
    if text not in PARTS:
        raise argparse.ArgumentTypeError(
            f"must name parts of the demo. Received: {text}. "
            f"Use any of: {', '.join(PARTS)}."
        )
    return text


if __name__ == "__main__":
    sys.exit(main())
