"""Tries programs in groups of processes, and shrinks those that fail."""

import contextlib
import random
import threading

from . import grammar
from .compare import judge
from .groups import PLACES, Group

# In seconds: the limit for a program on an idle machine.
LIMIT = 90
# Number of seeds in which to look for a program. The rarest feature occurs in
# one of 1,500.
MOST_SEEDS = 20_000
# In seconds: the limit for features that could only hang.
SOON = 20
# Number of tries to shrink a program that hangs.
HANGS = 6
# More workers, for programs that were drawn for three.
MANY = "12"
# Programs that wait for their group while others run.
AHEAD = 16
# Results of one process may vary: Keras's `steps_per_execution` reads weights
# while it assigns them. Workers must agree with one of these runs.
REFERENCES = 6
# Runs of one process that show what rounding errors change.
NUDGES = 3


class Machine:
    """Groups of processes, and the outcomes of their programs.

    Args:
        jobs: Number of programs at the same time.
        limit: Seconds that a program may take.
    """

    def __init__(self, jobs=2, limit=LIMIT):
        self._limit = limit
        self._free = threading.Condition()
        self._groups = {
            place: Group(place) for place in PLACES if place != "one"
        }
        self._busy = set()
        self.is_ending = False
        self._references = [Group("one") for _ in range(jobs)]
        self._all = [*self._groups.values(), *self._references]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for group in self._all:
            group.close()

    @contextlib.contextmanager
    def reference(self):
        with self._free:
            while not self._references:
                self._free.wait()
            group = self._references.pop()
        try:
            yield group
        finally:
            with self._free:
                self._references.append(group)
                self._free.notify_all()

    def take(self, programs):
        """Return the first of some programs whose group is free, or None.

        It is removed from the list. The caller has the group until `leave`.
        """
        with self._free:
            while programs:
                for number, (_, program) in enumerate(programs[:AHEAD]):
                    if program["where"] not in self._busy:
                        self._busy.add(program["where"])
                        return programs.pop(number)
                self._free.wait()
        return None

    def leave(self, program):
        with self._free:
            self._busy.discard(program["where"])
            self._free.notify_all()

    def run(self, program, in_new_group=False):
        """Return the outcome of a program; the caller must have its group.

        A new group runs it if `in_new_group`, or if it fails after another
        failure.
        """
        group = self._groups[program["where"]]
        if in_new_group:
            group.close()
        was_clean = group.is_clean
        reference, results = self._reference_of(program), []
        if reference is not None and not reference["error"]:
            limit = min(self._limit, limit_of(program))
            results = group.run(grammar.script(program), limit)
        outcome = judge(program, reference, results)
        for _ in range(REFERENCES - 1):
            if outcome.kind != "differs":
                break
            reference = self._reference_of(program)
            outcome = judge(program, reference, results)
        if outcome.kind == "differs":
            nudged = [
                self._reference_of(program, nudge)
                for nudge in range(1, NUDGES + 1)
            ]
            outcome = judge(program, reference, results, nudged)
        if None in results:
            outcome.detail += "\n" + group.last_words()
        if outcome.failed and not was_clean and not in_new_group:
            return self.run(program, in_new_group=True)
        outcome.cpu = sum(
            result["cpu"] for result in [reference, *results] if result
        )
        return outcome

    def _reference_of(self, program, nudge=0):
        """Return the result of a program in one process."""
        with self.reference() as one:
            script = grammar.script(program, ideal=True, nudge=nudge)
            return one.run(script, self._limit)[0]

    def confirm(self, program, outcome):
        """Run a failed program in a new group; return the outcome."""
        again = self.run(program, in_new_group=True)
        again.cpu += outcome.cpu
        if not again.failed:
            again.kind, again.failed = "failed once", True
            again.detail = f"{outcome.signature}\n{outcome.detail}"
            again.signature = f"failed once: {outcome.signature}"
        return again

    def shrink(self, program, outcome, tries):
        """Return the plainest program with a similar failure, and the outcome.

        Half of the features become plain at the same time, then a quarter, and
        so on.
        """
        if outcome.kind == "hang or crash":
            tries = min(tries, HANGS)
        size = len(grammar.unlike_plain(program)) // 2
        while size:
            names, start = grammar.unlike_plain(program), 0
            while start < len(names) and tries > 0 and not self.is_ending:
                simpler = plainer(program, names[start : start + size])
                start += size
                if simpler is None:
                    continue
                tries -= 1
                found = self.run(simpler)
                if found.is_like(outcome):
                    program, outcome = simpler, found
            size //= 2
        for simpler in shorter(program):
            if tries > 0 and not self.is_ending:
                tries -= 1
                found = self.run(simpler)
                if found.is_like(outcome):
                    return simpler, found
        return program, outcome


def limit_of(program):
    """Return the seconds that a program may take."""
    is_risky = (
        program["fetched"] != "by one" or program["made"] == "build outside"
    )
    return SOON if is_risky else LIMIT


def plainer(program, names):
    """Return a program with plain features, or None if they conflict."""
    changed = grammar.plain(program, names)
    return changed if is_valid(changed) else None


def shorter(program):
    """Yield programs with one layer, metric or callback less."""
    for name, value in program.items():
        if isinstance(value, list) and len(value) > 1:
            for index in range(len(value)):
                rest = value[:index] + value[index + 1 :]
                if is_valid({**program, name: rest}):
                    yield {**program, name: rest}


def is_valid(program):
    try:
        return grammar.broken(program) is None
    except KeyError:  # A feature does not fit the input or task.
        return False


def programs_of(seeds, where=None, only=None):
    """Yield seeds and their programs, for some places and features.

    Raises:
        ValueError: If `MOST_SEEDS` successive seeds have no such program.
    """
    since = 0
    for seed in seeds:
        since += 1
        if since > MOST_SEEDS:
            raise ValueError(
                "`--where` and `--only` must match some programs. Received: "
                f"where={where}, only={only}, which match none of "
                f"{MOST_SEEDS:,} programs. Name features of grammar.py, or "
                "their values, except each feature's first value."
            )
        program = grammar.draw(random.Random(seed))
        if where is not None and MANY in where and program["where"] == "3":
            program = {**program, "where": MANY}
            if not is_valid(program):
                continue
        if where is not None and program["where"] not in where:
            continue
        if only is not None and not any(has(program, one) for one in only):
            continue
        since = 0
        yield seed, program


def has(program, feature):
    """Return whether a feature, or the value of one, is not plain."""
    for name, value in program.items():
        if value == grammar.plainest(name, program):
            continue
        values = value if isinstance(value, list) else [value]
        if feature == name or feature in map(str, values):
            return True
    return False
