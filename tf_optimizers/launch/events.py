"""What the launcher waits for."""

import os
import select
import signal
import time
from contextlib import suppress


class Events:
    """Signals, the ends of workers among them, and calls of `wake`."""

    def __init__(self) -> None:
        self._requests = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup`
            self._requests.append(signal.SIGHUP)

    def __enter__(self) -> "Events":
        """Let signals no longer do what they do, but be waited for."""
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._receiver, False)
        os.set_blocking(self._sender, False)
        self._wakeup = signal.set_wakeup_fd(
            self._sender, warn_on_full_buffer=False
        )
        # With a handler, which need not do anything, a signal is written to
        # the pipe. SIGCHLD tells that a worker has ended.
        self._handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in [*self._requests, signal.SIGCHLD]
        }
        return self

    def __exit__(self, *_: object) -> None:
        """Let signals do again what they did."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        # The pipe stays open: a thread that forwards output may still `wake`.

    def wake(self) -> None:
        """Make `wait` return, from any thread."""
        with suppress(BlockingIOError):  # Full, so it will return anyway.
            os.write(self._sender, b"\0")

    def wait(self, seconds: float | None) -> signal.Signals | None:
        """Wait for any event; return a request to end the launcher."""
        if select.select([self._receiver], [], [], seconds)[0]:
            for number in os.read(self._receiver, 4096):
                if number in self._requests:
                    return signal.Signals(number)
        return None

    def wait_for_request(self, seconds: float) -> signal.Signals | None:
        """Wait for a request to end the launcher, at most for some time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            received = self.wait(left)
            if received is not None:
                return received
        return None
