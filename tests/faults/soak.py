"""Tries faults on trainings, and measures what becomes of them."""

import contextlib
import os
import pathlib
import random
import subprocess
import tempfile
import time

from faults import network, training
from faults.cases import CASES as LOCAL
from faults.cases import DAMAGED, ERROR, GOES_ON, RESUMES

CASES = {**LOCAL, **network.CASES}
# Of the training's 200 steps, so that there is a backup, and steps are left.
FIRST, LAST = 25, 120


def run(names, until, seed=0):
    """Yield the trials of cases: all once, then again until a time."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        expected = training.reference(pathlib.Path(folder))
    yield from (attempt(n, rng.randrange(FIRST, LAST), expected) for n in names)
    while True:
        for name in names:
            if time.time() > until:
                return
            yield attempt(name, rng.randrange(FIRST, LAST), expected)


def attempt(name, step, expected, **kwargs):
    """Return what became of one training.

    Args:
        name: Of the case.
        step: When to do harm.
        expected: The weights of a training without.
        **kwargs: Of the training.
    """
    if reason := missing(name):
        return {"case": name, "skipped": reason, "passed": True}
    try:
        found = _attempt(name, step, expected, **kwargs)
        return {"case": name, "step": step, **found}
    except TimeoutError as error:  # It hangs.
        return {
            "case": name,
            "step": step,
            "weights_equal": False,
            "passed": False,
            "error": str(error)[-5000:],
        }


def _attempt(name, step, expected, **kwargs):
    harm, outcome, message = CASES[name]
    make = network.Network if name in network.CASES else training.Training
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory())
        )
        if name == "disk full":
            stack.enter_context(small_disk(folder / "backup"))
        run = stack.enter_context(contextlib.closing(make(folder, **kwargs)))
        run.wait_for_step(step)
        now = time.time()
        since = harm(run) or now
        exit_code = run.wait()
        return {
            "exit_code": exit_code,
            **measure(run, since, expected),
            "passed": judge(run, outcome, message, exit_code, expected),
        }


def measure(run, since, expected):
    """Return times in seconds from the harm on, and what was lost."""
    result = {"weights_equal": ends_like(run, expected)}
    noticed = run.noticed(since)
    if noticed:
        result["detected"] = round(noticed - since, 2)
    events = run.events()
    begun = next(
        (e for e in events if e["time"] > since and e["event"] == "begin"), None
    )
    if begun:
        times = [e["time"] for e in events if e["pid"] == begun["pid"]]
        result["resumed"] = round(times[1] - since, 2) if times[1:] else None
        last = max(e["step"] for e in events if e["time"] < begun["time"])
        # A step that ends with a backup and exit is in no event.
        result["steps_lost"] = max(last - begun["step"], 0)
    return result


def ends_like(run, expected):
    """Tell whether both workers have come to the expected weights."""
    return all(
        run.events(place)[-1].get("weights") == expected for place in range(2)
    )


def judge(run, outcome, message, exit_code, expected):
    """Tell whether it ended as it should."""
    text = run.text()
    # What was not completed is no backup, and no damaged one either.
    if message not in text or (DAMAGED in text) != (message == DAMAGED):
        return False
    if outcome == ERROR:
        return exit_code != 0
    begins = sum(event["event"] == "begin" for event in run.events())
    return (
        exit_code == 0
        and ends_like(run, expected)
        and begins == {RESUMES: 2, GOES_ON: 1}[outcome]
    )


def missing(name):
    """Return why a case cannot be tried here, or None."""
    if name != "disk full" and name not in network.CASES:
        return None
    if os.geteuid():
        return "needs root"
    if name in network.CASES:
        return network.missing()
    return None


@contextlib.contextmanager
def small_disk(path):
    """Mount a file system on which a few backups have room."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    subprocess.run(command, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)
