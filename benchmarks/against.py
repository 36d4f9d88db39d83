"""Is a training step as fast as with another checkout of this project?

    python benchmarks/against.py FOLDER [--starts 8] [--rounds 12] [--steps 24]
        [--width 64] [--round-trip 0] [--contenders "dense, fit" ...]

Two workers use the package of this checkout, and two use the package in FOLDER.
The two groups take turns of a few steps. Each pair of turns gives a ratio: the
median step time of this checkout, divided by that of FOLDER. Processes differ
in speed from start to start, so all workers are started several times. Each
start gives the median of its ratios. The result is the mean over starts, with a
95% confidence interval by Student's t.
"""

import argparse
import contextlib
import itertools
import os
import pathlib
import statistics
from unittest import mock

import far_hosts
import latency
import seeds
import tqdm

HERE = pathlib.Path(__file__).parents[1]
CONTENDERS = [
    f"{optimizer}, {way}"
    for way in ("fit", "custom loop")
    for optimizer in ("dense", "DGC", "DGC, int4")
]


def start(checkout: pathlib.Path, width: int) -> far_hosts.FarGroup:
    """Start two workers with the package of a checkout."""
    command = [latency.__file__, "--work", "ours", "--width", str(width)]
    with mock.patch.dict(os.environ, PYTHONPATH=str(checkout)):
        return far_hosts.FarGroup(far_hosts.Loopback(2), command)


def ratios(arguments: argparse.Namespace) -> dict[str, float]:
    """Start all workers; return each contender's median ratio of step times."""
    with contextlib.ExitStack() as stack:
        groups = []
        for checkout in (HERE, arguments.folder):
            groups.append(start(checkout, arguments.width))
            stack.callback(groups[-1].end)
        for name, group in itertools.product(arguments.contenders, groups):
            group.ask(function="prepare", contender=name)
        for group in groups:
            group.set_round_trip(arguments.round_trip)
        found: dict[str, list[float]] = {n: [] for n in arguments.contenders}
        for turn, name in itertools.product(
            range(arguments.rounds), arguments.contenders
        ):
            # The checkouts take turns at being first.
            times = {
                i: statistics.median(
                    groups[i].ask(
                        function="measure",
                        contender=name,
                        steps=arguments.steps,
                    )[0]
                )
                for i in ((0, 1) if turn % 2 else (1, 0))
            }
            found[name].append(times[0] / times[1])
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=latency.MOST_STEPS)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument(
        "--round-trip", type=float, default=0, help="milliseconds"
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=latency.CONTENDERS,
        default=CONTENDERS,
    )
    arguments = parser.parse_args()
    starts = [ratios(arguments) for _ in tqdm.trange(arguments.starts)]
    for name in arguments.contenders:
        values = [each[name] for each in starts]
        listed = " ".join(f"{value:.3f}" for value in values)
        print(f"{name}: {seeds.interval(values, 3)}; {listed}", flush=True)


if __name__ == "__main__":
    main()
