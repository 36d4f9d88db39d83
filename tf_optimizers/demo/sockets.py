"""Counts the bytes that this process has sent over TCP."""

import contextlib
import os
import socket
import struct
import sys

FILES = "/proc/self/fd"

# The fields of Linux's `struct tcp_info` that are needed: at byte 200, the
# 64-bit `tcpi_bytes_sent` (since Linux 4.19), then `tcpi_bytes_retrans`.
_INFO = struct.Struct("=200x2Q")

# Bytes that each TCP socket has sent. Closed sockets keep their last count.
_sent_by_socket: dict[str, int] = {}


def sent_bytes() -> int | None:
    """Return how many bytes the TCP sockets of this process have sent.

    Packet headers and retransmissions do not count. The bytes that a socket
    sent between the last call and its own closing do not count either.

    Returns:
        Bytes, or None where the kernel does not count them (macOS, and Linux
        before 4.19).
    """
    if not _is_counted():
        return None
    for file in os.listdir(FILES):
        # The file may be another kind of socket, or already closed.
        with contextlib.suppress(OSError):
            name = os.readlink(f"{FILES}/{file}")  # "socket:[number]"
            if name.startswith("socket:"):
                _sent_by_socket[name] = _sent(int(file))
    return sum(_sent_by_socket.values())


def _is_counted() -> bool:
    if sys.platform != "linux" or not os.path.isdir(FILES):
        return False
    with socket.socket() as any_socket:
        return len(_info(any_socket)) == _INFO.size


def _sent(file: int) -> int:
    # `own` is a duplicate, so closing `own` leaves the socket open.
    with socket.fromfd(file, socket.AF_INET, socket.SOCK_STREAM) as own:
        sent, sent_again = _INFO.unpack(_info(own))
    return sent - sent_again


def _info(own: socket.socket) -> bytes:
    """Return the first bytes of `tcp_info`; older kernels return fewer."""
    return own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
