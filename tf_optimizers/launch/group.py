"""Starts, watches and ends a group of workers."""

import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import islice
from typing import NamedTuple

from tf_optimizers.launch.output import Output
from tf_optimizers.launch.platforms import Place
from tf_optimizers.launch.standbys import Standbys
from tf_optimizers.launch.worker import (
    BACKUP_GRACE,
    FAILURE_GRACE,
    PREEMPTED,
    Guard,
    Worker,
)


class Events:
    """Waits for a signal (SIGCHLD if a worker ends) or for a call to `wake`."""

    def __init__(self) -> None:
        self._requests = [signal.SIGINT, signal.SIGTERM]
        # `nohup` makes the launcher ignore SIGHUP.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._requests.append(signal.SIGHUP)

    def __enter__(self) -> "Events":
        """Catch signals until `__exit__`, so that each signal wakes `wait`."""
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._receiver, False)
        os.set_blocking(self._sender, False)
        self._wakeup = signal.set_wakeup_fd(
            self._sender, warn_on_full_buffer=False
        )
        # Python writes a signal's number to the pipe only if the signal has a
        # handler. This handler need not do anything.
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
        # The pipe stays open: a thread that forwards output may still use it.

    def wake(self) -> None:
        """Make `wait` return. Any thread may call this method."""
        with suppress(BlockingIOError):  # A full pipe also wakes `wait`.
            os.write(self._sender, b"\0")

    def wait(self, seconds: float | None) -> signal.Signals | None:
        """Wait for an event; return SIGINT, SIGTERM or SIGHUP if received.

        Args:
            seconds: The longest wait, or None for no limit.
        """
        if select.select([self._receiver], [], [], seconds)[0]:
            for number in os.read(self._receiver, 4096):
                if number in self._requests:
                    return signal.Signals(number)
        return None

    def wait_for_request(self, seconds: float) -> signal.Signals | None:
        """Wait up to `seconds` for SIGINT, SIGTERM or SIGHUP; return it."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            received = self.wait(left)
            if received is not None:
                return received
        return None


# Seconds between checks on workers that are ending.
TICK = 0.05
THREADS = "TF_NUM_INTRAOP_THREADS"
HASH_SEED = "PYTHONHASHSEED"
RESTART = "TF_OPTIMIZERS_RESTART"
# The longest pause that results from doubling, in seconds.
LONGEST_PAUSE = 60.0
NO_RESTART = "There will be no restart."


class Failure(NamedTuple):
    """The reason to stop all workers, and how to stop them."""

    reason: str
    exit_code: int
    request: signal.Signals = signal.SIGTERM
    may_restart: bool = False
    usual_grace: float = BACKUP_GRACE


class Job(NamedTuple):
    """A command to run in several workers, and the launcher's options.

    The command is a script or `-m module`, followed by arguments. `gpus`
    contains, for each worker, the environment variables that select its GPUs.
    `place` is the launcher's place in a cluster, or None. `addresses` contains
    the host:port of every worker of the cluster, or nothing without a cluster.
    `tf_optimizers.launch` documents the other fields, which are command line
    options.
    """

    command: Sequence[str]
    workers: int
    gpus: Sequence[dict[str, str]]
    place: Place | None
    addresses: Sequence[str]
    devices_per_worker: int
    host: str
    grace_period: float | None
    max_restarts: int
    restart_pause: float
    standby: float | None

    def start(
        self,
        guard: Guard,
        output: Output,
        attempt: int,
        stack: ExitStack,
        stands_by: bool,
    ) -> list[Worker]:
        """Start the workers. Closing `stack` ends them."""
        addresses = self.addresses or reserve_addresses(
            self.host, self.workers, stack
        )
        first = self.place.rank * self.workers if self.place else 0
        counted = {RESTART: str(attempt)} if self.max_restarts else {}
        group = []
        for index, gpus in enumerate(self.gpus):
            worker = Worker(first + index, self.grace_period, guard, output)
            stack.callback(worker.end)
            variables = environment(addresses, first + index, self.workers)
            if self.place and self.place.given and self.workers == 1:
                variables["TF_CONFIG"] = self.place.given
            worker.start(
                [str(self.devices_per_worker), *self.command],
                variables | gpus | counted,
                stands_by,
            )
            group.append(worker)
        return group


def launch(job: Job) -> int:
    """Run a job with up to `max_restarts` restarts; return the exit code."""
    with (
        Events() as events,
        closing(Output(events.wake)) as output,
        Guard() as guard,
    ):
        if job.place:
            output.say(job.place.describe(job.addresses))
        start = partial(job.start, guard, output)

        def attempt(number: int) -> Failure | None:
            with ExitStack() as stack:
                try:
                    group = standbys.take(stack) or start(number, stack, False)
                # For example, there are too many open files or threads.
                except (OSError, RuntimeError) as error:
                    output.say(f"Cannot start {job.workers} workers: {error}.")
                    return Failure("", 1)
                standbys.plan(number)
                return follow(group, events, output, standbys)

        with closing(
            Standbys(start, job.standby, job.max_restarts, output)
        ) as standbys:
            failure = attempt(0)
            planned = islice(pauses(job.restart_pause), job.max_restarts)
            for restart, pause in enumerate(planned, 1):
                if failure is None or not failure.may_restart:
                    break
                output.say(
                    f"Restart {restart} of {job.max_restarts} in {pause:g} s."
                )
                received = events.wait_for_request(pause)
                if received is not None:
                    output.say(f"Received {received.name}. {NO_RESTART}")
                    break
                failure = attempt(restart)
        return 0 if failure is None else failure.exit_code


def pauses(first: float) -> Iterator[float]:
    """Yield the seconds before each restart, which double up to a limit."""
    pause = first
    while True:
        yield pause
        pause = max(pause, min(2 * pause, LONGEST_PAUSE))


def reserve_addresses(host: str, count: int, stack: ExitStack) -> list[str]:
    """Return addresses that stay reserved until `stack` is closed.

    While a socket is bound to a port, even if it does not listen, the system
    assigns the port to no other program. TensorFlow's server can still listen
    on the port, because both sockets set SO_REUSEADDR.
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


def environment(
    addresses: Sequence[str], index: int, local: int
) -> dict[str, str]:
    """Return a worker's environment, with its `TF_CONFIG`.

    The user's own values override the other variables that are set here:

    - Connections between workers bypass any proxy (`http_proxy`).
    - The `local` workers of this launcher divide its cores, so that their
      threads do not compete.
    - A fixed hash seed gives a set of strings the same order on all workers,
      and after a restart.
    """
    config = {
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": index},
    }
    hosts = {
        address.rpartition(":")[0].strip("[]"): None for address in addresses
    }
    usual = {
        "no_grpc_proxy": ",".join(hosts),
        THREADS: str(max(1, cores() // local)),
        HASH_SEED: "0",
    }
    return {**usual, **os.environ, "TF_CONFIG": json.dumps(config)}


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def follow(
    group: Sequence[Worker],
    events: Events,
    output: Output,
    standbys: Standbys,
) -> Failure | None:
    """Watch the workers until all are done, or a second signal must kill them.

    If a signal arrives when all workers are gone, return even if some output
    has not been written yet.

    Returns the reason to stop the workers, or None if there was none.
    """
    failure, is_asked = None, False
    while not all(worker.is_done() for worker in group):
        seconds = standbys.seconds_left() if failure is None else None
        if any(worker.is_ending() for worker in group):
            seconds = TICK
        received = events.wait(seconds)
        for worker in group:
            worker.update()
        if failure is None:
            failure = first_failure(group, received, output)
            if failure is None:
                standbys.update()
            else:
                for worker in group:
                    worker.stop(failure.request, failure.usual_grace)
                output.say(failure.reason)
        elif received is not None and not is_asked:
            output.say(f"Received {received.name}. {NO_RESTART}")
        # A second SIGHUP kills no workers: when a terminal closes, the kernel
        # and the shell both send SIGHUP.
        elif received not in (None, signal.SIGHUP):
            output.say(f"Received {received.name} again. Killing all workers.")
            break
        if failure is not None and received is not None:
            failure, is_asked = failure._replace(may_restart=False), True
            # Do not wait until all output is written: its reader may be gone.
            if all(worker.is_gone for worker in group):
                break
    return failure


def first_failure(
    group: Sequence[Worker], received: signal.Signals | None, output: Output
) -> Failure | None:
    """Return the reason to stop all workers, if there is one."""
    for worker in group:
        if code := worker.exit_code:
            # A worker that ended early may be the cause of the failure.
            ended = [each for each in group if each.exit_code == 0]
            reasons = [each.describe_end() for each in (worker, *ended)]
            reason = " ".join([*reasons, "Stopping all workers."])
            grace = BACKUP_GRACE if code == PREEMPTED else FAILURE_GRACE
            return Failure(reason, code, may_restart=True, usual_grace=grace)
    if received is not None:
        reason = f"Received {received.name}. Stopping all workers."
        return Failure(reason, 128 + received, received)
    if output.error is not None:
        return Failure(f"Cannot write the output: {output.error}.", 1)
    return None
