"""Tries random programs: `python -m tests.programs --minutes 60`."""

import argparse
import collections
import itertools
import json
import os
import pathlib
import signal
import sys
import threading
import time

from . import grammar
from .groups import AT_LEAST, PLACES
from .machine import Machine, programs_of

# How often similar failures are shrunk.
ALIKE = 2


def arguments():
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs",
        description="Compares random programs with one process.",
    )
    parser.add_argument("--minutes", type=float, help="how long")
    parser.add_argument("--programs", type=int, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--where",
        nargs="+",
        choices=[place for place in PLACES if place != "one"],
        help="where programs run",
    )
    parser.add_argument(
        "--only", nargs="+", help="features; a program has at least one of them"
    )
    parser.add_argument(
        "--program", type=json.loads, help="its features that are not plain"
    )
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument(
        "--slowness",
        type=float,
        default=1.0,
        help="how many times longer programs may take",
    )
    parser.add_argument("--shrink", type=int, default=25, help="tries")
    parser.add_argument(
        "--folder", type=pathlib.Path, default=pathlib.Path("failed-programs")
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="print the scripts without running them",
    )
    return parser.parse_args()


class Run:
    """Runs programs, until there are no more or the time is over.

    Args:
        programs: Pairs of a seed, or name, and a program.
        minutes: The largest time.
        jobs: Number of programs at the same time.
        shrink: Number of tries to shrink a failing program.
        folder: The folder for failing programs.
        show: Called with a text after each program.
    """

    def __init__(
        self,
        programs,
        minutes=10**6,
        jobs=2,
        shrink=0,
        folder=None,
        show=lambda text: None,
    ):
        self._programs = iter(programs)
        self._until = time.monotonic() + 60 * minutes
        self._jobs, self._tries = jobs, shrink
        self._folder, self._show = folder, show
        self._waiting = []
        self._lock = threading.Lock()
        self._shrunk = collections.Counter()
        self.outcomes = []  # Tuples (seed, program, outcome).
        self.explanations = []

    def all(self):
        with Machine(self._jobs) as machine:
            threads = [
                threading.Thread(target=self._work, args=(machine,))
                for _ in range(self._jobs)
            ]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:
                self._until = 0.0  # Show a table of the finished programs.
                machine.is_ending = True
        return self

    def _work(self, machine):
        while time.monotonic() < self._until:
            with self._lock:
                missing = 24 - len(self._waiting)
                self._waiting += itertools.islice(self._programs, missing)
            taken = machine.take(self._waiting)
            if taken is None:
                return
            seed, program = taken
            try:
                outcome = machine.run(program)
                if outcome.failed:
                    outcome = self._explain(machine, seed, program, outcome)
                self._note(seed, program, outcome)
            finally:
                machine.leave(program)

    def _note(self, seed, program, outcome):
        with self._lock:
            self.outcomes.append((seed, program, outcome))
        counts = collections.Counter(o.kind for _, _, o in self.outcomes)
        self._show(", ".join(f"{n} {kind}" for kind, n in counts.items()))

    def _explain(self, machine, seed, program, outcome):
        """Shrink a failing program, and write it to the folder."""
        self._shrunk[outcome.signature] += 1
        if self._tries and self._shrunk[outcome.signature] <= ALIKE:
            program, found = machine.shrink(program, outcome, self._tries)
            found = machine.confirm(program, found)
            found.signature = outcome.signature
            outcome = found
        text = explanation(seed, program, outcome)
        self.explanations.append(text)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{seed}.py").write_text(text)
            print(f"\n{text}\n", flush=True)
        return outcome


def progress_bar(total):
    """Return a function that counts a program, and shows a text."""
    try:
        import tqdm
    except ImportError:
        return lambda text: print(text, flush=True)
    bar = tqdm.tqdm(total=total, unit=" programs", dynamic_ncols=True)

    def show(text):
        bar.set_postfix_str(text, refresh=False)
        bar.update()

    return show


def features_of(program):
    """Return the features of a program that are not plain."""
    return {
        name: value
        for name, value in program.items()
        if value != grammar.plainest(name, program) or name == "where"
    }


COMMANDS = {
    "1": "python script.py",
    "mirrored": "with two logical CPU devices",
    "devices": "with two logical CPU devices",
    "elsewhere": "with two logical CPU devices",
    "12": "python -m tf_optimizers.launch --workers 12 script.py",
    "2": "python -m tf_optimizers.launch --workers 2 script.py",
    "3": "python -m tf_optimizers.launch --workers 3 script.py",
    "2x2": (
        "python -m tf_optimizers.launch --workers 2 --devices-per-worker 2 "
        "script.py"
    ),
}


def explanation(seed, program, outcome):
    """Return a failing program as a standalone script."""
    about = [
        f"seed {seed}: {outcome.kind}",
        json.dumps(features_of(program)),
        f"Run: {COMMANDS[program['where']]}",
        *outcome.detail.splitlines(),
    ]
    header = "".join(f"# {line}\n" for line in about)
    return f"{header}\n{grammar.script(program)}\nprint(seen)"


def table(outcomes, seconds):
    """Return a table of outcomes with their counts."""
    lines = []
    kinds = collections.Counter(outcome.kind for _, _, outcome in outcomes)
    for kind, count in kinds.most_common():
        lines.append(f"{count:6} {kind}")
    reasons = collections.Counter(
        (outcome.kind, outcome.signature)
        for _, _, outcome in outcomes
        if outcome.kind != "agreed"
    )
    for (_, signature), count in reasons.most_common(60):
        seeds = [s for s, _, o in outcomes if o.signature == signature][:5]
        lines.append(f"    {count:4} {signature}  (seeds {seeds})")
    cpu = sum(outcome.cpu for _, _, outcome in outcomes)
    count = max(1, len(outcomes))
    lines.append(
        f"{len(outcomes)} programs in {seconds / 60:.1f} minutes, "
        f"{60 * len(outcomes) / max(seconds, 1):.1f} a minute, "
        f"{cpu / count:.1f} s of processor time each"
    )
    return "\n".join(lines)


def main():
    options = arguments()
    programs = programs_of(
        itertools.count(options.seed), options.where, options.only
    )
    if options.program is not None:
        programs = [("given", grammar.program_of(options.program))]
    programs = itertools.islice(programs, options.programs)
    if options.show:
        for seed, program in programs:
            print(f"# seed {seed}\n{grammar.script(program)}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ[AT_LEAST] = str(options.slowness)
    started = time.monotonic()
    run = Run(
        programs,
        options.minutes or 10**6,
        options.jobs,
        options.shrink,
        options.folder,
        progress_bar(options.programs),
    ).all()
    print("\n" + table(run.outcomes, time.monotonic() - started))
    failed = [seed for seed, _, outcome in run.outcomes if outcome.failed]
    if failed:
        print(f"Failed: {failed}; see {options.folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
