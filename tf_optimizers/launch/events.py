"""Collects the events that the launcher waits for."""

import os
import select
import signal
import time
from contextlib import suppress


class Events:
    """Signals, including those of workers' ends, and calls of `wake`."""

    def __init__(self) -> None:
        self._requests = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup`
            self._requests.append(signal.SIGHUP)

    def __enter__(self) -> "Events":
        """Catch signals from now on, for `wait` to return."""
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._receiver, False)
        os.set_blocking(self._sender, False)
        self._wakeup = signal.set_wakeup_fd(
            self._sender, warn_on_full_buffer=False
        )
        # Python writes a signal to the pipe only if it has a handler, even an
        # empty one. SIGCHLD comes when a worker has ended.
        self._handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in [*self._requests, signal.SIGCHLD]
        }
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the signals' handlers."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        # The pipe stays open: a thread that forwards output may still `wake`.

    def wake(self) -> None:
        """Make `wait` return, from any thread."""
        with suppress(BlockingIOError):  # A full pipe ends `wait` anyway.
            os.write(self._sender, b"\0")

    def wait(self, seconds: float | None) -> signal.Signals | None:
        """Wait for any event; return it if it is a request to end."""
        if select.select([self._receiver], [], [], seconds)[0]:
            for number in os.read(self._receiver, 4096):
                if number in self._requests:
                    return signal.Signals(number)
        return None

    def wait_for_request(self, seconds: float) -> signal.Signals | None:
        """Wait at most `seconds` for a request to end the launcher."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            received = self.wait(left)
            if received is not None:
                return received
        return None
