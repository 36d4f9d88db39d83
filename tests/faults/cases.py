"""What can go wrong, and what should become of it.

A case gets a `Training` that has come to a random step, and does it harm.
"""

import contextlib
import os
import signal
import time

# What should happen after a fault.
RESUMES, GOES_ON, ERROR = "resumes", "goes on", "error"


def kill(*places):
    def harm(training):
        for place in places:
            os.kill(training.pid(place), signal.SIGKILL)

    return harm


def stop(place, seconds=None):
    """For good, if no time is given."""

    def harm(training):
        pid = training.pid(place)
        os.kill(pid, signal.SIGSTOP)
        if seconds:
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    return harm


def damage(change):
    """Kill all by the launcher, change the newest backup, start again."""

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
    """Let the second worker's script have a fault from now on."""
    return lambda training: (training.folder / "fault").write_text(name)


def change_version(training):
    make_wrong("version")(training)
    kill(0)(training)


def fill_disk(training):
    """Take all room of the file system, which is a small one."""
    path = training.folder / "backup" / "ballast"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


CASES = {
    "chief killed": (kill(0), RESUMES, "Worker 0 was killed"),
    "other worker killed": (kill(1), RESUMES, "Worker 1 was killed"),
    "all workers killed": (kill(0, 1), RESUMES, "was killed by signal 9"),
    "launcher killed": (kill_launcher, RESUMES, ""),
    "worker stopped for 3 s": (stop(1, 3), GOES_ON, ""),
    "worker stopped for good": (stop(1), RESUMES, "Worker 0"),
    "chief stopped for good": (stop(0), RESUMES, "Worker 1"),
    "backup truncated": (damage(truncate), RESUMES, "another checksum"),
    "bit of backup flipped": (damage(flip), RESUMES, "another checksum"),
    "disk full": (fill_disk, ERROR, "No space left on device"),
    "another version of the script": (
        change_version,
        ERROR,
        "momentum=0.9 on worker 0, momentum=0.8 on worker 1",
    ),
    "NaN gradient on one worker": (
        make_wrong("nan"),
        ERROR,
        "A weight must be finite to be backed up",
    ),
    "inf gradient on one worker": (
        make_wrong("inf"),
        ERROR,
        "A weight must be finite to be backed up",
    ),
}
