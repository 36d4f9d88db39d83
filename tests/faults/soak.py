"""Tries faults on trainings, and measures the outcomes."""

import contextlib
import os
import pathlib
import random
import subprocess
import tempfile
import time

from faults import network, training
from faults.cases import CASES as LOCAL
from faults.cases import DAMAGED, ERROR, GOES_ON, RESUMES, STANDING_BY
from launcher import processes_with

CASES = {**LOCAL, **STANDING_BY, **network.CASES}
# From the training's 200 steps: after a backup, with steps left.
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
    """Return the outcome of one training.

    Args:
        name: The name of the case.
        step: The step of the fault.
        expected: The weights of a training without a fault.
        **kwargs: Arguments of the training.
    """
    if reason := missing(name):
        return {"case": name, "skipped": reason, "passed": True}
    try:
        found = _attempt(name, step, expected, **kwargs)
        return {"case": name, "step": step, **found}
    # It hangs, or leaves processes.
    except (TimeoutError, ChildProcessError) as error:
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
    if name in STANDING_BY:
        kwargs["standby"] = True
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory())
        )
        stack.callback(check_gone, folder)
        if name == "disk full":
            stack.enter_context(small_disk(folder / "backup"))
        run = stack.enter_context(contextlib.closing(make(folder, **kwargs)))
        run.wait_for_step(step)
        now = time.time()
        since = harm(run) or now
        exit_code = run.wait()
        passed = judge(run, outcome, message, exit_code, expected)
        return {
            "exit_code": exit_code,
            **measure(run, since, expected),
            "passed": passed,
            **({} if passed else {"error": run.text()[-5000:]}),
        }


def check_gone(folder, seconds=20):
    """Raise if processes of a training still run after some seconds.

    They would take the memory of the next trials.
    """
    until = time.time() + seconds
    while left := processes_with(str(folder)):
        if time.time() > until:
            raise ChildProcessError(f"Still running: {left}.")
        time.sleep(0.05)


def measure(run, since, expected):
    """Return seconds since the fault, and the lost steps."""
    result = {"weights_equal": ends_like(run, expected)}
    noticed = run.noticed(since)
    if noticed:
        result["detected"] = round(noticed - since, 2)
    events = run.events()
    begun = next(
        (e for e in events if e["time"] > since and e["event"] == "begin"), None
    )
    if begun:
        # Batches that the backup has seen are no steps.
        times = [
            e["time"]
            for e in events
            if e["pid"] == begun["pid"] and e["step"] > begun["step"]
        ]
        result["resumed"] = round(times[0] - since, 2) if times else None
        last = max(e["step"] for e in events if e["time"] < begun["time"])
        # No event records a step that ends with a backup and exit.
        result["steps_lost"] = max(last - begun["step"], 0)
    return result


def ends_like(run, expected):
    """Return whether both workers have reached the expected weights."""
    return all(
        run.events(place)[-1].get("weights") == expected for place in range(2)
    )


def judge(run, outcome, message, exit_code, expected):
    """Return whether a training ended as expected."""
    text = run.text()
    # An incomplete backup counts neither as a backup nor as a damaged one.
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
    """Return the reason why a case cannot run here, or None."""
    if name != "disk full" and name not in network.CASES:
        return None
    if os.geteuid():
        return "needs root"
    if name in network.CASES:
        return network.missing()
    return None


@contextlib.contextmanager
def small_disk(path):
    """Mount a file system with space for a few backups."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    subprocess.run(command, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)
