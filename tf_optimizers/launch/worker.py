"""Runs one worker, and ends it even if the launcher is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tf_optimizers.launch.output import Forwarder, Output

CHILD = str(Path(__file__).with_name("child.py"))
# Linux's list of all processes; macOS has none.
PROCESSES = Path("/proc")
# The exit code of a worker that SIGTERM has ended. After SIGTERM to any worker,
# `BackupAndRestore` makes all workers back up and exit with this code.
PREEMPTED = 128 + signal.SIGTERM
# Seconds between the request to stop and SIGKILL, unless the user sets a grace
# period. `BACKUP_GRACE` leaves time for a backup. After a failure, workers
# cannot back up, so `FAILURE_GRACE` is shorter.
BACKUP_GRACE, FAILURE_GRACE = 30.0, 10.0
# Seconds from one check on killed processes to the next.
KILL_TICK = 0.01


class Guard:
    """A process that kills all workers once the launcher is gone.

    `lifeline` is the write end of a pipe. It is closed when the launcher ends,
    even if the launcher is killed. `child.guard` documents the lines in the
    pipe.
    """

    def __enter__(self) -> "Guard":
        """Start the guard."""
        reader, self.lifeline = os.pipe()
        # Start a separate session, which Ctrl-C does not reach.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", CHILD, "guard"],
            stdin=reader,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(reader)
        return self

    def forget(self, group: int) -> None:
        """Send the guard the ID of a process group that has ended."""
        # If the guard has been killed, the run continues without a guard.
        with suppress(BrokenPipeError):
            os.write(self.lifeline, b"-%d\n" % group)

    def __exit__(self, *_: object) -> None:
        """Make the guard kill all remaining workers, and wait until it ends."""
        os.close(self.lifeline)
        self._process.wait()


class Worker:
    """A worker: a process, the process group that it leads, and its output.

    A worker has ended once `exit_code` is set. The worker is gone once its
    group has no process left, and done once its output is written too.
    """

    def __init__(
        self,
        index: int,
        grace_period: float | None,
        guard: Guard,
        output: Output,
    ) -> None:
        self.exit_code: int | None = None
        self.is_gone = True
        self._index = index
        self._grace_period = grace_period
        self._kill_at: float | None = None
        self._guard = guard
        self._output = output
        self._forwarders: list[Forwarder] = []

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stands_by: bool = False,
    ) -> None:
        """Start a process that runs `child.work`.

        If this method fails partway, `end` still cleans up. A standby worker
        waits for a call to `begin`.
        """
        lifeline = self._guard.lifeline
        mode = "stand-by" if stands_by else "work"
        self._process = subprocess.Popen(
            [sys.executable, "-u", CHILD, mode, str(lifeline), *arguments],
            env=environment,
            stdin=subprocess.PIPE if stands_by else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[lifeline],
            start_new_session=True,
        )
        self.is_gone = False
        prefix = f"[worker {self._index}] "
        for source, stream in (
            (self._process.stdout, sys.stdout),
            (self._process.stderr, sys.stderr),
        ):
            if source is not None:
                self._forwarders.append(
                    Forwarder(source, prefix, self._output, stream)
                )

    def begin(self) -> None:
        """Make a standby worker run its command."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # The worker was killed.
                os.write(self._process.stdin.fileno(), b"\n")
            self._process.stdin.close()

    def is_ending(self) -> bool:
        """Return whether `stop` or `end` was called, and processes are left."""
        return self._kill_at is not None and not self.is_gone

    def is_done(self) -> bool:
        """Return whether the worker is gone and its output is written."""
        written = all(forwarder.is_done for forwarder in self._forwarders)
        return self.is_gone and written

    def describe_end(self) -> str:
        """Return a sentence about how the process ended."""
        name, number = f"Worker {self._index}", -self._process.returncode
        if number > 0:
            meaning = signal.strsignal(number)
            return f"{name} was killed by signal {number} ({meaning})."
        if self.exit_code == 0:
            return f"{name} had exited with code 0."
        if self.exit_code == PREEMPTED:
            return f"{name} exited with code {PREEMPTED}, after SIGTERM."
        return f"{name} failed with exit code {self.exit_code}."

    def stop(self, request: signal.Signals, usual_grace: float) -> None:
        """Send a signal to the worker, and SIGKILL after the grace period.

        The grace period starts at the first call. It lasts `usual_grace`
        seconds, unless the user has set another.
        """
        if self.is_gone:
            return
        self._signal_group(request)
        if self._kill_at is None:
            grace = self._grace_period
            grace = usual_grace if grace is None else grace
            self._kill_at = time.monotonic() + grace

    def update(self) -> None:
        """Check on the worker, and kill it if its grace period is over."""
        if self.is_gone:
            return
        code = self._process.poll()
        if code is not None and self.exit_code is None:
            self.exit_code = 128 - code if code < 0 else code
            # End the processes that the worker has started, too.
            self.stop(signal.SIGTERM, FAILURE_GRACE)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._signal_group(signal.SIGKILL)
        if code is not None and not self._is_alive():
            self.is_gone = True
            self._guard.forget(self._process.pid)
            for forwarder in self._forwarders:
                forwarder.finish()

    def end(self) -> None:
        """Kill the worker, and wait until all its processes are gone."""
        self._kill_at = time.monotonic()
        self.update()
        while not self.is_gone:
            time.sleep(KILL_TICK)
            self.update()

    def _is_alive(self) -> bool:
        """Return whether a process of the worker's group is alive.

        Zombies do not count: a zombie stays in its group until its parent reads
        its exit code.
        """
        if not PROCESSES.exists() or not self._signal_group(0):
            return self._signal_group(0)
        for file in PROCESSES.glob("[0-9]*/stat"):
            with suppress(OSError):  # The process has ended in the meantime.
                # Read bytes: Linux may cut a name in the middle of a character.
                _, _, after_name = file.read_bytes().rpartition(b")")
                state, _, group, *_ = after_name.split()
                if int(group) == self._process.pid and state not in b"ZX":
                    return True
        return False

    def _signal_group(self, number: int) -> bool:
        """Signal the worker's group; return whether a process is left in it."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True
