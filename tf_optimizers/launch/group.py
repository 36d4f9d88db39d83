"""A group of workers: how it starts, is watched and ends."""

import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import islice
from typing import NamedTuple

from tf_optimizers.launch.output import Output
from tf_optimizers.launch.worker import Watchdog, Worker

# How often workers that are ending are looked at, in seconds.
TICK = 0.05
# Tells a worker how often all have been started anew.
RESTART = "TF_OPTIMIZERS_RESTART"
# The longest pause before a restart that is not asked for, in seconds.
LONGEST_PAUSE = 60.0
NO_RESTART = "There will be no restart."


def launch(
    command: Sequence[str],
    *,
    workers: int,
    devices: int,
    host: str,
    grace_period: float,
    max_restarts: int,
    restart_pause: float,
) -> int:
    """Run `python *command` in several processes; return the exit code.

    Args:
        command: script and arguments, or `-m`, module and arguments.
        workers: int >= 1. Processes.
        devices: int >= 1. Logical CPU devices of each.
        host: address of this machine at which they find each other.
        grace_period: float >= 0. Seconds from the request to end to SIGKILL.
        max_restarts: int >= 0. How often to start all anew when one fails.
        restart_pause: float >= 0. Seconds before the first time.
    """
    with (
        Events() as events,
        closing(Output(events.wake)) as output,
        Watchdog() as watchdog,
    ):

        def attempt(restart: int) -> Failure | None:
            counted = {RESTART: str(restart)} if max_restarts else {}
            with ExitStack() as stack:
                group = []
                try:
                    addresses = reserve_addresses(host, workers, stack)
                    for index in range(workers):
                        worker = Worker(index, grace_period, watchdog, output)
                        stack.callback(worker.end)
                        worker.start(
                            [str(devices), *command],
                            environment(addresses, index) | counted,
                        )
                        group.append(worker)
                # Too many files are open, or too many threads started.
                except (OSError, RuntimeError) as error:
                    output.say(f"Cannot start {workers} workers: {error}.")
                    return Failure("", 1)
                return follow(group, events, output)

        failure = attempt(0)
        planned = islice(pauses(restart_pause), max_restarts)
        for restart, pause in enumerate(planned, 1):
            if failure is None or not failure.may_restart:
                break
            output.say(f"Restart {restart} of {max_restarts} in {pause:g} s.")
            received = events.wait_for_request(pause)
            if received is not None:
                output.say(f"Received {received.name}. {NO_RESTART}")
                break
            failure = attempt(restart)
        return 0 if failure is None else failure.exit_code


def pauses(first: float) -> Iterator[float]:
    """Yield those before the restarts: each is twice the last, to a limit."""
    pause = first
    while True:
        yield pause
        pause = max(pause, min(2 * pause, LONGEST_PAUSE))


def reserve_addresses(host: str, count: int, stack: ExitStack) -> list[str]:
    """Return addresses that are nobody else's until `stack` is closed.

    A socket that is bound but does not listen keeps others from being given
    its port, while TensorFlow's server, which sets SO_REUSEADDR as we do, can
    listen there. So no gap lies between choosing a port and using it.
    """
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    family, kind, protocol, _, any_port = found[0]
    name = f"[{host}]" if ":" in host else host
    addresses = []
    for _ in range(count):
        port = stack.enter_context(socket.socket(family, kind, protocol))
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(any_port)
        addresses.append(f"{name}:{port.getsockname()[1]}")
    return addresses


def environment(addresses: list[str], index: int) -> dict[str, str]:
    """Return that of a worker, which tells TensorFlow its place."""
    config = {
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": index},
    }
    return {**os.environ, "TF_CONFIG": json.dumps(config)}


def follow(
    group: Sequence[Worker], events: "Events", output: Output
) -> "Failure | None":
    """Watch the workers until they end, or a second request to end comes.

    Returns:
        What has stopped them, or None if they ended by themselves.
    """
    failure, is_asked = None, False
    while not all(worker.is_done() for worker in group):
        ending = any(worker.is_ending() for worker in group)
        received = events.wait(TICK if ending else None)
        for worker in group:
            worker.update()
        if failure is None:
            failure = first_failure(group, received, output)
            if failure is not None:
                for worker in group:
                    worker.stop(failure.request)
                output.say(failure.reason)
        elif received is not None and not is_asked:
            output.say(f"Received {received.name}. {NO_RESTART}")
        # A closing terminal sends several: the kernel's, and the shell's.
        elif received not in (None, signal.SIGHUP):
            output.say(f"Received {received.name} again. Workers are killed.")
            break
        if failure is not None and received is not None:
            failure, is_asked = failure._replace(may_restart=False), True
            # Only output is left, and nobody may be reading it.
            if all(worker.is_gone for worker in group):
                break
    return failure


class Failure(NamedTuple):
    """Why all workers are stopped, and how."""

    reason: str
    exit_code: int
    request: signal.Signals = signal.SIGTERM
    may_restart: bool = False


def first_failure(
    group: Sequence[Worker], received: signal.Signals | None, output: Output
) -> Failure | None:
    """Return the reason to stop all workers, if there is one."""
    for worker in group:
        if worker.exit_code:
            reason = f"{worker.describe_end()} All workers are stopped."
            return Failure(reason, worker.exit_code, may_restart=True)
    if received is not None:
        reason = f"Received {received.name}. All workers are stopped."
        return Failure(reason, 128 + received, received)
    if output.error is not None:
        return Failure(f"Cannot write the output: {output.error}.", 1)
    return None


class Events:
    """What the launcher waits for: signals, and calls of `wake`."""

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
