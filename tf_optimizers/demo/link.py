"""Simulates a slow network on one machine, without root privileges.

    worker 0 ─ forwarder ── worker 1      worker 1 ─ forwarder ── worker 0

A worker listens at its own address, and reaches the other workers through the
ports of its own forwarder. In each direction, the forwarder delays bytes by
half a round trip and sends them at the link's rate, in order. Bytes wait in
memory, so TCP windows do not slow the link further. All connections through a
forwarder share one link, as all connections of a host share its cable.

The forwarder is this file, run as a script, so that Python loads no other
module of the package:

    python link.py '[["HOST", PORT], ...]'

The script prints a port for each address. Each line of its standard input sets
the link: the bytes per second, and the seconds per round trip. The script
answers each line with an empty line, and ends when its standard input ends.
"""

import asyncio
import collections
import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

LOCALHOST = "127.0.0.1"
GRAIN = 0.002  # The link sends bytes in pieces that take this many seconds.
# After a small read on a connection with a long delay, the forwarder waits
# `GRAIN` for more. Otherwise, one read per packet would take much of the
# workers' CPU time. The delay, in seconds, is so long that `GRAIN` hardly
# matters. The size, in bytes, is too small to limit the rate of large messages.
LONG, SMALL = 10 * GRAIN, 1 << 15
UNITS = {"kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}

Address = tuple[str, int]


class Link(NamedTuple):
    """A connection between two hosts.

    Args:
        rate: Bits per second, in each direction.
        round_trip: Seconds from one host to the other and back.
    """

    rate: float = math.inf
    round_trip: float = 0.0

    def __str__(self) -> str:
        """Return the text that `parse_link` reads."""
        if self == NONE:
            return "none"
        unit, size = max(
            (item for item in UNITS.items() if item[1] <= self.rate),
            key=lambda item: item[1],
            default=("kbit/s", 1e3),
        )
        milliseconds = _plain(1e3 * self.round_trip)
        return f"{_plain(self.rate / size)} {unit}, {milliseconds} ms"


NONE = Link()


def _plain(number: float) -> str:
    """Return a number as text without an exponent."""
    return f"{Decimal(f'{number:.12g}'):f}"


def parse_link(text: str) -> Link:
    """Return the link for a text such as "100 Mbit/s, 20 ms"."""
    if text == "none":
        return NONE
    number = r"(\d+(?:\.\d+)?)"
    units = "|".join(UNITS)
    found = re.fullmatch(rf"{number} ?({units}),? {number} ?ms", text)
    if found is None or not float(found[1]):
        raise ValueError(
            f"A link must have a rate and a round-trip time. Received: {text}. "
            'Write it as "100 Mbit/s, 20 ms", or write "none".'
        )
    return Link(float(found[1]) * UNITS[found[2]], float(found[3]) / 1e3)


class LinkError(RuntimeError):
    """The process that simulates a link does not answer."""


class Forwarder:
    """A process that forwards bytes between this worker and the other workers.

    The forwarder ends when this process ends, even if this process is killed.

    Args:
        targets: The addresses to forward to. The forwarder has a port for each.
        enter: A prefix of the command, for example to enter a network
            namespace.
    """

    def __init__(
        self, targets: Sequence[Address], enter: Sequence[str] = ()
    ) -> None:
        self._process = subprocess.Popen(
            [*enter, sys.executable, __file__, json.dumps(targets)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.ports: list[int] = json.loads(self._read())
        except LinkError:
            self.close()
            raise

    def set(self, link: Link) -> None:
        """Change the simulated link; the forwarder begins without one."""
        line = f"{link.rate / 8} {link.round_trip}"
        print(line, file=self._process.stdin, flush=True)
        self._read()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> str:
        line = next(iter(self._process.stdout or []), "")
        if not line:
            raise LinkError(
                "A simulated link needs ports on the loopback interface. "
                "Received: no answer from its process; see the error above. "
                "Check that `ping 127.0.0.1` works, or pass `--link none`."
            )
        return line


def detour(
    config: dict[str, Any], enter: Sequence[str] = ()
) -> tuple[Forwarder, dict[str, Any]]:
    """Start a worker's forwarder; return it and a `TF_CONFIG` that uses it.

    Args:
        config: The worker's `TF_CONFIG`, with the addresses of all workers.
        enter: See `Forwarder`.
    """
    here, workers = config["task"]["index"], list(config["cluster"]["worker"])
    others = [i for i in range(len(workers)) if i != here]
    addresses = [workers[i].rsplit(":", 1) for i in others]
    targets = [(host, int(port)) for host, port in addresses]
    forwarder = Forwarder(targets, enter)
    for i, port in zip(others, forwarder.ports, strict=True):
        workers[i] = f"{LOCALHOST}:{port}"
    return forwarder, config | {"cluster": {"worker": workers}}


def join() -> Forwarder:
    """Put a forwarder between this worker and the others in `TF_CONFIG`.

    Call this before you create the strategy, which reads `TF_CONFIG`.
    """
    forwarder, config = detour(json.loads(os.environ["TF_CONFIG"]))
    os.environ["TF_CONFIG"] = json.dumps(config)
    return forwarder


class Direction:
    """One direction of a link."""

    def __init__(self) -> None:
        self.bytes_per_second = math.inf
        self.delay = 0.0
        self._free = 0.0

    def pieces(self, data: bytes) -> list[bytes]:
        """Cut bytes into pieces that arrive one after another."""
        size = max(1, int(min(GRAIN * self.bytes_per_second, len(data))))
        return [data[i : i + size] for i in range(0, len(data), size)] or [data]

    def arrival(self, now: float, size: int) -> float:
        """Return the arrival time of `size` bytes that are sent now."""
        self._free = max(self._free, now) + size / self.bytes_per_second
        return self._free + self.delay


class End(asyncio.Protocol):
    """One end of a connection; forwards received bytes to the other end."""

    other: "End"
    transport: Any = None  # None until connected.

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._due: collections.deque[tuple[float, bytes]] = collections.deque()
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, through which the other end sends bytes."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Queue bytes; empty bytes end the connection."""
        now, is_first = self._loop.time(), not self._due
        for piece in self._direction.pieces(data):
            due = self._direction.arrival(now, len(piece))
            self._due.append((due, piece))
        if is_first:
            self.send()
        if 0 < len(data) < SMALL and self._direction.delay >= LONG:
            self.transport.pause_reading()
            self._loop.call_later(GRAIN, self.transport.resume_reading)

    def connection_lost(self, error: Exception | None) -> None:
        """Close the other end once everything is sent."""
        self.data_received(b"")

    def send(self) -> None:
        """Send the queued pieces that are due, and schedule the next one."""
        if self.other.transport is None:
            return
        while self._due and self._due[0][0] <= self._loop.time():
            _, data = self._due.popleft()
            if data:
                self.other.transport.write(data)
            else:
                self.other.transport.close()
        if self._due:
            self._loop.call_at(self._due[0][0], self.send)


class NearEnd(End):
    """The end that accepts a connection, and connects to the target."""

    def __init__(
        self, there: Direction, back: Direction, target: Address
    ) -> None:
        super().__init__(there)
        self._target = target
        self.other = End(back)
        self.other.other = self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect to the target; queue bytes until then."""
        super().connection_made(transport)
        self._task = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            await self._loop.create_connection(
                lambda: self.other, *self._target
            )
        except OSError:
            # The target may not be listening yet. The client will try again.
            self.transport.abort()
        else:
            self.send()


async def serve(targets: Sequence[Address]) -> None:
    """Forward until the standard input ends."""
    there, back = Direction(), Direction()
    loop, ports = asyncio.get_running_loop(), []
    for target in targets:
        server = await loop.create_server(
            partial(NearEnd, there, back, target), LOCALHOST, 0
        )
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    ended = asyncio.Event()

    def listen() -> None:
        for line in sys.stdin:
            rate, round_trip = map(float, line.split())
            for direction in (there, back):
                direction.bytes_per_second = rate
                direction.delay = round_trip / 2
            print(flush=True)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=listen, daemon=True).start()
    await ended.wait()


def main() -> None:
    """Forward to the addresses on the command line."""
    # The parent handles Ctrl-C, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Linux's default selector would round each waiting time up to whole
    # milliseconds.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    loop.run_until_complete(serve(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
