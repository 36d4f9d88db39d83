"""One worker: its processes and its end, also when the launcher is killed."""

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


class Watchdog:
    """A process that kills the workers' groups once the launcher is gone.

    `lifeline` is the writing end of a pipe. It closes when the launcher ends,
    in whatever way. What is written to it stands in `child.watch`.
    """

    def __enter__(self) -> "Watchdog":
        """Start it."""
        reader, self.lifeline = os.pipe()
        # In a session of its own, for Ctrl-C to pass it by.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", CHILD, "watch"],
            stdin=reader,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(reader)
        return self

    def forget(self, group: int) -> None:
        """Say that a process group has ended."""
        # Should the watchdog have been killed, the run goes on without it.
        with suppress(BrokenPipeError):
            os.write(self.lifeline, b"-%d\n" % group)

    def __exit__(self, *_: object) -> None:
        """Let it kill whom it has not been told to forget, and end."""
        os.close(self.lifeline)
        self._process.wait()


class Worker:
    """A worker: a process, the process group that it leads, its output.

    Its life: started; ended, when `exit_code` is known; gone, when nobody is
    left in its group; done, when its output is written.

    Args:
        index: place in the cluster.
        arguments: of `child.work`, the lifeline left out.
        environment: of the process.
        grace_period: seconds from the request to end to SIGKILL.
        watchdog: kills the group if the launcher cannot.
        output: where its stdout and stderr go.
    """

    def __init__(
        self,
        index: int,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        grace_period: float,
        watchdog: Watchdog,
        output: Output,
    ) -> None:
        self.exit_code: int | None = None
        self.is_gone = False
        self._name = f"Worker {index}"
        self._grace_period = grace_period
        self._kill_at: float | None = None
        self._watchdog = watchdog
        lifeline = watchdog.lifeline
        self._process = subprocess.Popen(
            [sys.executable, CHILD, "work", str(lifeline), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[lifeline],
            start_new_session=True,
        )
        self._forwarders = [
            Forwarder(source, f"[worker {index}] ", output, stream)
            for source, stream in (
                (self._process.stdout, sys.stdout),
                (self._process.stderr, sys.stderr),
            )
            if source is not None
        ]

    def is_ending(self) -> bool:
        """Tell whether the group has been asked to end, and has not yet."""
        return self._kill_at is not None and not self.is_gone

    def is_done(self) -> bool:
        """Tell whether the group has ended and its output is written."""
        written = all(forwarder.is_done for forwarder in self._forwarders)
        return self.is_gone and written

    def describe_end(self) -> str:
        """Say how the process has ended, as a sentence."""
        number = -self._process.returncode
        if number > 0:
            meaning = signal.strsignal(number)
            return f"{self._name} was killed by signal {number} ({meaning})."
        return f"{self._name} failed with exit code {self.exit_code}."

    def stop(self, request: signal.Signals) -> None:
        """Ask the group to end; the first call starts the grace period."""
        if self.is_gone:
            return
        self._signal_group(request)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_period

    def update(self) -> None:
        """Take note of what has ended, and kill what is overdue."""
        if self.is_gone:
            return
        code = self._process.poll()
        if code is not None and self.exit_code is None:
            self.exit_code = 128 - code if code < 0 else code
            # What it has started ends with it.
            self.stop(signal.SIGTERM)
        overdue = self._kill_at is not None and time.monotonic() > self._kill_at
        if overdue:
            self._signal_group(signal.SIGKILL)
        if code is not None and (overdue or not self._signal_group(0)):
            self.is_gone = True
            self._watchdog.forget(self._process.pid)
            for forwarder in self._forwarders:
                forwarder.finish()

    def _signal_group(self, number: int) -> bool:
        """Signal the group; tell whether anybody is left in it."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True
