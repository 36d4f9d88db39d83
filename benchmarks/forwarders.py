"""Forwarders of TCP connections, which delay each direction.

    python benchmarks/forwarders.py '[[PORT, "HOST", PORT], ...]'

For every route, what connects to the first port of this host reaches the
other address. Each line of the standard input is a delay in seconds for all,
from then on; the answer is an empty line. Ends with its standard input.

Bytes keep their order. They wait in memory, so that a connection is as fast
with a delay as without.
"""

import asyncio
import collections
import json
import selectors
import subprocess
import sys
import threading
from collections.abc import Sequence

Route = tuple[int, str, int]


class Delay:
    """The seconds that each direction takes, which may change at any time."""

    seconds = 0.0


class End(asyncio.Protocol):
    """One end of a connection: what it receives, the other end sends."""

    other: "End"
    transport: asyncio.Transport | None = None  # Until it is connected.

    def __init__(self, delay: Delay) -> None:
        self._delay = delay
        self._due: collections.deque[tuple[float, bytes]] = collections.deque()
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note where to send."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Put bytes behind those that wait; none are the end."""
        self._due.append((self._loop.time() + self._delay.seconds, data))
        if len(self._due) == 1:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        """Let the other end know, behind all that was sent."""
        self.data_received(b"")

    def _send(self) -> None:
        """Send what is due, and come back when the next will be."""
        if self.other.transport is None:
            return
        while self._due and self._due[0][0] <= self._loop.time():
            _, data = self._due.popleft()
            if data:
                self.other.transport.write(data)
            else:
                self.other.transport.close()
        if self._due:
            self._loop.call_at(self._due[0][0], self._send)


class NearEnd(End):
    """The end that was connected to; it connects to the far one."""

    def __init__(self, delay: Delay, target: tuple[str, int]) -> None:
        super().__init__(delay)
        self._target = target
        self.other = End(delay)
        self.other.other = self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect; what is received until then waits."""
        super().connection_made(transport)
        self._task = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            await self._loop.create_connection(
                lambda: self.other, *self._target
            )
        except OSError:
            # Nobody there, yet: who has connected will try again.
            self.transport.abort()
        else:
            self._send()


async def serve(routes: Sequence[Route]) -> None:
    """Forward until the standard input ends."""
    delay, loop = Delay(), asyncio.get_running_loop()
    for port, *target in routes:
        await loop.create_server(
            lambda target=target: NearEnd(delay, target), "127.0.0.1", port
        )
    print(flush=True)
    ended = asyncio.Event()

    def listen() -> None:
        for line in sys.stdin:
            delay.seconds = float(line)
            print(flush=True)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=listen, daemon=True).start()
    await ended.wait()


class Forwarders:
    """The forwarders of one host, in a process of their own.

    Args:
        routes: Port on this host, and host and port that it leads to.
        enter: The start of a command line, if it is to run elsewhere.
    """

    def __init__(
        self, routes: Sequence[Route], enter: Sequence[str] = ()
    ) -> None:
        self._process = subprocess.Popen(
            [*enter, sys.executable, __file__, json.dumps(routes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process.stdout.readline()  # All ports are open.

    def set_round_trip(self, milliseconds: float) -> None:
        """Let each direction take half of it."""
        self._process.stdin.write(f"{milliseconds / 2e3}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    # Of all selectors only this one waits for less than a millisecond.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    loop.run_until_complete(serve(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
