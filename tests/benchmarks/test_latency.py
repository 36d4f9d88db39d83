"""Links of the latency benchmark are as long as they say, and lose nothing."""

import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
import time

import far_hosts
import forwarders
import latency
import pytest
import tables

HOST = far_hosts.LOCALHOST


def echo(listener):
    """Send back what comes, on one connection after another."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)


@pytest.fixture
def link():
    """A forwarder to an echo, and its port."""
    near, far = far_hosts.free_ports(2)
    started = forwarders.Forwarders([(near, HOST, far)])
    with socket.create_server((HOST, far)) as listener:
        thread = threading.Thread(target=echo, args=[listener], daemon=True)
        thread.start()
        yield started, near
        started.end()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def round_trip(port):
    """Return the milliseconds of the fastest of several."""
    times = []
    with socket.create_connection((HOST, port)) as connection:
        for _ in range(5):
            start = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def test_forwarder_delays_each_direction(link):
    started, port = link
    for milliseconds in (0, 60, 20):
        started.set_round_trip(milliseconds)
        assert 0 <= round_trip(port) - milliseconds < 15


def test_forwarder_keeps_order_whatever_the_delay(link):
    started, port = link
    data = random.Random(0).randbytes(1 << 22)
    parts = [data[i : i + (1 << 16)] for i in range(0, len(data), 1 << 16)]
    received = b""
    with socket.create_connection((HOST, port)) as connection:

        def send():
            for i, part in enumerate(parts):
                if i % 8 == 0:
                    started.set_round_trip(40 - 20 * (i // 8 % 3))
                connection.sendall(part)

        thread = threading.Thread(target=send)
        thread.start()
        while len(received) < len(data):
            received += connection.recv(1 << 16)
        thread.join()
    assert received == data


def test_forwarder_waits_for_nobody():
    """Workers of a group do not start at once: who is early tries again."""
    near, far = far_hosts.free_ports(2)
    started = forwarders.Forwarders([(near, HOST, far)])
    with contextlib.closing(socket.create_connection((HOST, near))) as early:
        early.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert early.recv(1) == b""
    with socket.create_server((HOST, far)) as listener:
        threading.Thread(target=echo, args=[listener], daemon=True).start()
        assert round_trip(near) < 1e3
        listener.shutdown(socket.SHUT_RDWR)
    started.end()


def test_worker_knows_its_own_address_and_ways_to_the_others():
    found = json.loads(far_hosts.config(["a", "b", "c"], 1, [7, 8, 9]))
    ways = [f"{HOST}:7", "b:8", f"{HOST}:9"]
    assert found["cluster"] == {"worker": ways}
    assert found["task"] == {"type": "worker", "index": 1}


def test_round_trips_are_what_delay_adds():
    step_ms = {"0": [9.0, 10.0, 50.0], "20": [50.0], "80": [170.0, 170.0]}
    assert latency.round_trips_of(step_ms) == {"20": 2.0, "80": 2.0}


@pytest.mark.long
def test_benchmark_runs(tmp_path):
    path = tmp_path / "latency.json"
    contender = "dense, custom loop"
    subprocess.run(
        [
            *(sys.executable, latency.__file__, "--quick", "--workers", "2"),
            *("--contenders", contender, "--output", str(path)),
        ],
        check=True,
        timeout=600,
    )
    result = json.loads(path.read_text())["models"]["2 workers"]
    times = result["contenders"][contender]["step_ms"]
    assert set(times) == {"0", "20"}
    # The gradients' sum is a round trip at least.
    assert min(times["20"]) > 20
    assert contender in tables.latency("2 workers", result)
