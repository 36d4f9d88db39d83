"""How many bytes this process has sent to others."""

import contextlib
import os
import socket
import struct
import sys

FILES = "/proc/self/fd"

# Linux's `struct tcp_info`, as far as it is needed: 64-bit `tcpi_bytes_sent` at
# its byte 200, since Linux 4.19, and `tcpi_bytes_retrans` after it.
_INFO = struct.Struct("=200x2Q")

# What each TCP socket has sent; of closed ones, what was seen last.
_sent_by_socket: dict[str, int] = {}


def sent_bytes() -> int | None:
    """Return what the TCP sockets of this process have sent.

    Headers of packets, and what was sent again, are no part of it. Sockets that
    have closed count as they stood at the call before.

    Returns:
        Bytes, or None where the kernel does not count them (macOS, and Linux
        before 4.19).
    """
    if not _is_counted():
        return None
    for file in os.listdir(FILES):
        # Of another kind than TCP, or closed in this very moment.
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
    # A duplicate: closing it leaves the socket open.
    with socket.fromfd(file, socket.AF_INET, socket.SOCK_STREAM) as own:
        sent, sent_again = _INFO.unpack(_info(own))
    return sent - sent_again


def _info(own: socket.socket) -> bytes:
    """Return the kernel's, cut to what is needed; older ones have less."""
    return own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
