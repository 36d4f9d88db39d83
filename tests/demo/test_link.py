"""Simulated links have the given rate and round trip, and lose nothing."""

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest.mock

import pytest
from launcher import assert_gone, is_alive

from tf_optimizers.demo import link, probe
from tf_optimizers.demo.link import NONE, Forwarder, Link, parse_link

HOST = link.LOCALHOST


def echo(listener):
    """Echo bytes, on one connection after another."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)


@contextlib.contextmanager
def echoing(listener):
    """Run an echo at an address in the background."""
    with listener:
        thread = threading.Thread(target=echo, args=[listener], daemon=True)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def forwarder():
    """Return a forwarder to an echo."""
    with echoing(socket.create_server((HOST, 0))) as address:
        started = Forwarder([address])
        yield started
        started.close()


def connect(forwarder):
    return socket.create_connection((HOST, forwarder.ports[0]))


def round_trip(forwarder):
    """Return the milliseconds of the fastest of several round trips."""
    times = []
    with connect(forwarder) as connection:
        for _ in range(5):
            start = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def exchange(connection, data, before=lambda number: None):
    """Send data, and return the echo."""
    size, received = 1 << 16, bytearray()

    def send():
        for i in range(0, len(data), size):
            before(i // size)
            connection.sendall(data[i : i + size])

    thread = threading.Thread(target=send)
    thread.start()
    while len(received) < len(data):
        received += connection.recv(size)
    thread.join()
    return bytes(received)


def test_forwarder_delays_each_direction(forwarder):
    for milliseconds in (0, 60, 20):
        forwarder.set(Link(round_trip=milliseconds / 1e3))
        assert 0 <= round_trip(forwarder) - milliseconds < 15


@pytest.mark.parametrize(
    ("size", "delay", "pauses"),
    [
        (link.SMALL - 1, link.LONG, 1),
        (link.SMALL, link.LONG, 0),
        (link.SMALL - 1, 0.9 * link.LONG, 0),
        (0, link.LONG, 0),
    ],
)
def test_only_small_pieces_on_a_long_link_pause(size, delay, pauses):
    async def receive():
        direction = link.Direction()
        direction.delay = delay
        end, transport = link.End(direction), unittest.mock.Mock()
        end.other = link.End(direction)
        end.connection_made(transport)
        end.data_received(bytes(size))
        assert transport.pause_reading.call_count == pauses
        await asyncio.sleep(2 * link.GRAIN)
        assert transport.resume_reading.call_count == pauses

    asyncio.run(receive())


@pytest.mark.parametrize("rate", [20e6, 100e6])
def test_forwarder_keeps_to_the_rate(forwarder, rate):
    """Both directions are used, since the echo arrives while data are sent."""
    forwarder.set(Link(rate, 0.01))
    with connect(forwarder) as connection:
        data, start = bytes(int(0.4 * rate / 8)), time.perf_counter()
        assert exchange(connection, data) == data
        seconds = time.perf_counter() - start
    assert 0.4 < seconds < 0.6


def test_connections_share_the_rate(forwarder):
    rate = 40e6
    with echoing(socket.create_server((HOST, 0))) as other:
        shared = Forwarder([other, other])
        shared.set(Link(rate))
        start, each = time.perf_counter(), bytes(int(0.2 * rate / 8))
        connections = [
            socket.create_connection((HOST, port)) for port in shared.ports
        ]
        for connection in connections:
            connection.sendall(each)
        # The echo answers one connection after the other.
        for connection in connections:
            left = len(each)
            while left:
                left -= len(connection.recv(left))
            connection.close()
        assert time.perf_counter() - start > 0.4
        shared.close()


def test_forwarder_keeps_order_on_any_link(forwarder):
    data = random.Random(0).randbytes(1 << 22)

    def change(number):
        if number % 8 == 0:
            step = number // 8 % 3
            rate = (1e9, 200e6, math.inf)[step]
            forwarder.set(Link(rate, 0.04 - 0.02 * step))

    with connect(forwarder) as connection:
        assert exchange(connection, data, change) == data


def test_forwarder_does_not_wait_for_targets():
    """Workers do not start at the same time: the first ones try again."""
    with socket.create_server((HOST, 0)) as place:
        address = place.getsockname()
    forwarder = Forwarder([address])
    with contextlib.closing(connect(forwarder)) as early:
        early.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert early.recv(1) == b""
    with echoing(socket.create_server(address)):
        assert round_trip(forwarder) < 1e3
    forwarder.close()


def test_worker_knows_its_own_address_and_ways_to_the_others(monkeypatch):
    addresses = ["10.0.0.1:7", "10.0.0.2:8", "10.0.0.3:9"]
    task = {"type": "worker", "index": 1}
    config = {"cluster": {"worker": addresses}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    forwarder = link.join()
    forwarder.close()
    found = json.loads(os.environ["TF_CONFIG"])
    near, far = (f"{HOST}:{port}" for port in forwarder.ports)
    assert found == {
        "cluster": {"worker": [near, "10.0.0.2:8", far]},
        "task": task,
    }


def test_forwarder_ends_with_its_process_in_any_case():
    program = (
        "import sys, time; from link import Forwarder\n"
        "forwarder = Forwarder([]); print(forwarder._process.pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=os.path.dirname(link.__file__),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        number = int(process.stdout.readline())
        os.kill(number, signal.SIGINT)  # Its process ends it.
        time.sleep(0.2)
        goes_on = is_alive(number)
        process.kill()
    assert goes_on
    assert_gone([number])


def test_probe_measures_the_link():
    """A busy machine adds delays, so the bounds are wide."""
    rate, round_trip = probe.measure(Link(50e6, 0.03))
    assert 30e6 < rate < 51e6
    assert 0.03 <= round_trip < 0.045


def test_probe_of_a_fast_link_sends_few_bytes(monkeypatch):
    sizes = []
    monkeypatch.setattr(probe, "_seconds", lambda _, n: sizes.append(n) or n)
    probe.measure(Link(1e11, 0.0))
    assert max(sizes) <= 1 << 27


def test_probe_notices_a_broken_link():
    ours, other = socket.socketpair()
    with ours, other:
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(probe.LoopbackError, match="with 1 bytes left"):
            probe._seconds(ours, 1)


def test_machine_without_ports_is_explained(monkeypatch):
    probe.check_loopback()

    def refuse(address):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(probe.LoopbackError, match="Received: .*Cannot assign"):
        probe.check_loopback()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100 Mbit/s, 20 ms", Link(100e6, 0.02)),
        ("2.5 Gbit/s, 0.5 ms", Link(2.5e9, 0.0005)),
        ("64 kbit/s, 300 ms", Link(64e3, 0.3)),
        ("1000000 Gbit/s, 0.00001 ms", Link(1e15, 1e-8)),
        ("none", NONE),
    ],
)
def test_text_describes_a_link(text, expected):
    assert parse_link(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text", ["fast", "100 Mbit/s", "20 ms", "0 Mbit/s, 1 ms", "1 Gbit/s, -1 ms"]
)
def test_bad_link_is_explained(text):
    with pytest.raises(ValueError, match=f"Received: {text}. Write it as"):
        parse_link(text)
