"""Faults, and the expected outcomes.

A case gets a `Training` at a random step, and causes a fault. If the fault is
later than the call, it returns the time.
"""

import contextlib
import os
import signal
import time

# The expected outcomes of faults.
RESUMES, GOES_ON, ERROR = "resumes", "goes on", "error"
# The error for a damaged backup.
DAMAGED = "does not match its checksum"


def kill(*places):
    def harm(training):
        for place in places:
            os.kill(training.pid(place), signal.SIGKILL)

    return harm


def ask(place):
    def harm(training):
        os.kill(training.pid(place), signal.SIGTERM)

    return harm


def kill_while_it_writes(place, file):
    """Kill a worker when half of a file is written; there must be no backup."""

    def harm(training):
        order = training.folder / "stall"
        # Written at once, so that no worker reads a part of it.
        order.with_suffix(".new").write_text(f"{file}.partial")
        order.with_suffix(".new").rename(order)
        training.wait_for(
            lambda: training.events(place)[-1]["event"] == "stall"
        )
        order.unlink()
        kill(place)(training)
        return time.time()

    return harm


def stop(place, seconds=None):
    """Stop processes, permanently if no time is given."""

    def harm(training):
        pid = training.pid(place)
        os.kill(pid, signal.SIGSTOP)
        if seconds:
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    return harm


def damage(change):
    """Kill the launcher and its workers, damage the newest backup, restart."""

    def harm(training):
        training.kill_launcher()
        newest = max((training.folder / "backup").glob("*.worker-1.npz"))
        data = bytearray(newest.read_bytes())
        newest.write_bytes(change(data))
        training.start()

    return harm


def flip(data):
    data[len(data) // 2] ^= 1
    return data


def truncate(data):
    return data[: len(data) // 2]


def kill_launcher(training):
    training.kill_launcher()
    training.start()


def make_wrong(name):
    """Add a fault to the second worker's script, from now on."""

    def harm(training):
        (training.folder / "fault").write_text(name)

    return harm


def change_version(training):
    make_wrong("version")(training)
    kill(0)(training)


def fill_disk(training):
    """Fill the file system, which is small."""
    path = training.folder / "backup" / "ballast"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


CASES = {
    "chief killed": (kill(0), RESUMES, "Worker 0 was killed"),
    "other worker killed": (kill(1), RESUMES, "Worker 1 was killed"),
    "all workers killed": (kill(0, 1), RESUMES, "was killed by signal 9"),
    "worker asked to end": (ask(1), RESUMES, "exit code 143, after a backup"),
    "chief asked to end": (ask(0), RESUMES, "exit code 143, after a backup"),
    "launcher killed": (kill_launcher, RESUMES, ""),
    "chief killed as it writes its part": (
        kill_while_it_writes(0, "worker-0.npz"),
        RESUMES,
        "Worker 0 was killed",
    ),
    "other worker killed as it writes its part": (
        kill_while_it_writes(1, "worker-1.npz"),
        RESUMES,
        "Worker 1 was killed",
    ),
    "chief killed as it completes a backup": (
        kill_while_it_writes(0, "json"),
        RESUMES,
        "Worker 0 was killed",
    ),
    "worker stopped for 3 s": (stop(1, 3), GOES_ON, ""),
    "worker stopped permanently": (stop(1), RESUMES, "Worker 0"),
    "chief stopped permanently": (stop(0), RESUMES, "Worker 1"),
    "backup truncated": (damage(truncate), RESUMES, DAMAGED),
    "bit of backup flipped": (damage(flip), RESUMES, DAMAGED),
    "disk full": (fill_disk, ERROR, "No space left on device"),
    "another version of the script": (
        change_version,
        ERROR,
        "momentum=0.9 on worker 0, momentum=0.8 on worker 1",
    ),
    "NaN gradient on one worker": (
        make_wrong("nan"),
        ERROR,
        "A variable must be finite to be backed up",
    ),
    "inf gradient on one worker": (
        make_wrong("inf"),
        ERROR,
        "A variable must be finite to be backed up",
    ),
}

# The same where the launcher has the next processes ready.
STANDING_BY = {
    f"{name}, with `--standby`": CASES[name]
    for name in ("chief killed", "other worker killed", "all workers killed")
}
