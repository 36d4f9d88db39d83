"""Checks that loopback works, and measures simulated links."""

import socket
import statistics
import threading
import time
from contextlib import closing, suppress

from tf_optimizers.demo.link import LOCALHOST, Forwarder, Link

ROUND_TRIPS = 20
SECONDS = 0.5  # How long to send bytes at the link's rate.
MOST_BYTES = 1 << 26  # A forwarder keeps all bytes on the link in memory.
CHUNK = 1 << 16


class LoopbackError(RuntimeError):
    """Processes of this machine cannot reach each other."""


def check_loopback() -> None:
    """Raise if workers of this machine cannot reach each other."""
    try:
        with socket.create_server((LOCALHOST, 0)) as server:
            socket.create_connection(server.getsockname(), 5).close()
    except OSError as error:
        raise LoopbackError(
            "The workers of the demo need ports on the loopback interface. "
            f"Received: {error}. Enable the interface (`ip link set lo up`), "
            "free some ports, or run the other parts: "
            "`--parts large-batch offload`."
        ) from error


def measure(link: Link) -> Link:
    """Return the measured rate and round trip of a forwarder's link."""
    with socket.create_server((LOCALHOST, 0)) as server:
        threading.Thread(target=_echo, args=[server], daemon=True).start()
        forwarder = Forwarder([server.getsockname()])
        with closing(forwarder):
            forwarder.set(link)
            address = (LOCALHOST, forwarder.ports[0])
            with socket.create_connection(address) as connection:
                round_trip = statistics.median(
                    _seconds(connection, 1) for _ in range(ROUND_TRIPS)
                )
                size = min(int(SECONDS * link.rate / 8), MOST_BYTES)
                seconds = _seconds(connection, size) - round_trip
    return Link(8 * size / seconds, round_trip)


def _seconds(connection: socket.socket, size: int) -> float:
    """Send `size` bytes; return the seconds until they have come back."""
    sender = threading.Thread(target=connection.sendall, args=[bytes(size)])
    start, left = time.perf_counter(), size
    if size > CHUNK:
        sender.start()  # Send while reading, or both ends would block.
    else:
        sender.run()
    while left:
        received = len(connection.recv(min(left, CHUNK)))
        if not received:
            raise LoopbackError(
                "A simulated link must forward all bytes. Received: the end of "
                f"the connection, with {left} bytes left. See the error above, "
                "or pass `--link none`."
            )
        left -= received
    return time.perf_counter() - start


def _echo(server: socket.socket) -> None:
    with suppress(OSError):
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := connection.recv(CHUNK):
                connection.sendall(data)
