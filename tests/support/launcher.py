"""Runs the launcher in the background of a test, and inspects processes."""

import os
import subprocess
import threading
import time
from pathlib import Path

from real_workers import LAUNCHER

# Timeout in seconds, far more than needed, since the machine may be busy.
LIMIT = 300
# Seconds of sleeps and grace periods that a test must never wait for.
LONG = 600

INDEX = """
import json, os, signal, subprocess, sys, time
cluster = json.loads(os.environ["TF_CONFIG"])
index = cluster["task"]["index"]
restart = int(os.environ.get("TF_OPTIMIZERS_RESTART", 0))
"""


class Launcher:
    """A launcher in the background, killed at the end of the test."""

    def __init__(self, arguments, folder, **options):
        self.error_file = folder / f"stderr-{time.monotonic_ns()}"
        with self.error_file.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*LAUNCHER, *arguments],
                cwd=folder,
                stderr=stderr,
                **{"stdout": subprocess.PIPE, **options},
            )
        # Limits every read and wait below.
        self._timer = threading.Timer(LIMIT, self.process.kill)
        self._timer.start()

    def pids(self, count):
        """Return the process ids of the next `count` lines `ready pid ...`."""
        found = []
        for _ in range(count):
            line = self.process.stdout.readline()
            assert b"ready" in line, self.errors()
            found += map(int, line.split()[3:])
        return found

    def children(self):
        pid = self.process.pid
        return pids_in(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def errors(self):
        return self.error_file.read_text()

    def wait_to_hear(self, text):
        has_ended = False
        while f"[launcher] {text}\n" not in self.errors():
            assert not has_ended, self.errors()
            has_ended = self.process.poll() is not None
            time.sleep(0.01)

    def wait(self):
        return self.process.wait()

    def close(self):
        self.process.kill()
        self.process.wait()
        self._timer.cancel()
        self._timer.join()
        if self.process.stdout:
            self.process.stdout.close()


def pids_in(text):
    return [int(word) for word in text.split()]


def is_alive(pid):
    """Return whether a process runs; False for a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def assert_gone(pids, seconds=20):
    assert pids
    until = time.monotonic() + seconds
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < until, f"Still running: {left}."
        time.sleep(0.02)


def lines_of(output, worker):
    """Return the lines of one worker's output, without their prefix."""
    prefix = f"[worker {worker}] ".encode()
    found = [line for line in output.split(b"\n") if line.startswith(prefix)]
    return [line[len(prefix) :] for line in found]


def processes_with(text):
    """Return processes with `text` in the command line or working folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            known = (folder / "cmdline").read_bytes().decode(errors="replace")
            known += os.readlink(folder / "cwd")
        except OSError:
            continue  # It has ended, or belongs to another user.
        if text in known and is_alive(int(folder.name)):
            found.append(known)
    return found
