"""The demo's counter counts only the bytes of this process."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest

from tf_optimizers.demo import sockets
from tf_optimizers.demo.sockets import sent_bytes

pytestmark = pytest.mark.skipif(
    sent_bytes() is None, reason="no counter of bytes"
)

HOSTS = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


@contextlib.contextmanager
def connection(family=socket.AF_INET):
    """Yield both ends of a connection, after a message in each direction."""
    with contextlib.ExitStack() as stack:
        try:
            server = socket.create_server((HOSTS[family], 0), family=family)
        except OSError:
            pytest.skip("no such addresses")
        stack.enter_context(server)
        left = socket.create_connection(server.getsockname()[:2], 10)
        stack.enter_context(left)
        right, _ = server.accept()
        stack.enter_context(right)
        yield left, right


def send(left, right, size):
    """Send from one end to the other, and wait for the bytes."""
    left.sendall(bytes(size))
    while size:
        size -= len(right.recv(size))


@pytest.mark.parametrize("family", HOSTS, ids=["IPv4", "IPv6"])
def test_counts_bytes_sent_in_both_directions(family):
    before = sent_bytes()
    with connection(family) as (left, right):
        send(left, right, 12_345)
        assert sent_bytes() - before == 12_345
        send(right, left, 77)
        send(left, right, 1)
        assert sent_bytes() - before == 12_345 + 77 + 1


def test_closed_socket_still_counts():
    before = sent_bytes()
    for sent in (1000, 2000, 3000):
        with connection() as (left, right):
            send(left, right, 1000)
            assert sent_bytes() - before == sent
        assert sent_bytes() - before == sent


def test_ignores_bytes_of_other_processes():
    program = (
        "import socket, sys\n"
        "to = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "to.sendall(bytes(100_000))\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        before = sent_bytes()
        port = str(server.getsockname()[1])
        with subprocess.Popen([sys.executable, "-c", program, port]):
            here, _ = server.accept()
            with here:
                received = 0
                while part := here.recv(100_000):
                    received += len(part)
                assert received == 100_000
                assert sent_bytes() == before


def test_passes_over_files_of_other_kinds(tmp_path):
    with contextlib.ExitStack() as stack:
        stack.enter_context((tmp_path / "file").open("w"))
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            for end in socket.socketpair(socket.AF_UNIX, kind):
                stack.enter_context(end).send(b"pair")
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        stack.enter_context(datagrams).bind(("127.0.0.1", 0))
        before, files = sent_bytes(), os.listdir(sockets.FILES)
        datagrams.sendto(b"to itself", datagrams.getsockname())
        assert sent_bytes() == before
        assert os.listdir(sockets.FILES) == files


def test_is_none_if_the_kernel_does_not_count(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sockets, "FILES", "/nowhere")
        assert sent_bytes() is None
    # An older kernel's table is shorter.
    monkeypatch.setattr(sockets, "_info", lambda own: bytes(192))
    assert sent_bytes() is None
