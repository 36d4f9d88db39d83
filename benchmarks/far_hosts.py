"""Workers that are a chosen round trip apart.

    worker 0 ─ forwarder ── worker 1      worker 1 ─ forwarder ── worker 0

A worker listens at its own address, and knows of the others the ports of
forwarders that run beside it; see forwarders.py. On a `hosts.Network` links
have a rate, too; on `Loopback` no rights are needed.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import hosts
from forwarders import Forwarders

LOCALHOST = "127.0.0.1"


class Loopback:
    """This machine, in place of a `hosts.Network`."""

    def __init__(self, count: int) -> None:
        self.hosts = [f"host{i}" for i in range(count)]
        self.addresses = [LOCALHOST] * count

    def enter(self, name: str) -> list[str]:
        """Return what starts a command on a host."""
        return []


class FarGroup(hosts.Group):
    """One process of this script on every host, far from each other.

    Args:
        net: `Loopback`, or the network with the hosts.
        arguments: Of the script.
    """

    def __init__(
        self, net: hosts.Network | Loopback, arguments: list[str]
    ) -> None:
        count = len(net.hosts)
        ports = free_ports(count * count)
        # Whoever is here knows whoever is there by ports[here][there].
        ports = [ports[i * count : (i + 1) * count] for i in range(count)]
        self.forwarders = [
            Forwarders(
                [
                    (
                        ports[here][there],
                        net.addresses[there],
                        ports[there][there],
                    )
                    for there in range(count)
                    if there != here
                ],
                net.enter(host),
            )
            for here, host in enumerate(net.hosts)
        ]
        self.processes = [
            subprocess.Popen(
                [*net.enter(host), sys.executable, *arguments],
                env=os.environ
                | {"TF_CONFIG": config(net.addresses, here, ports[here])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for here, host in enumerate(net.hosts)
        ]

    def set_round_trip(self, milliseconds: float) -> None:
        """Move the workers apart, from now on."""
        for forwarders in self.forwarders:
            forwarders.set_round_trip(milliseconds)

    def end(self) -> None:
        """End all processes."""
        super().end()
        for forwarders in self.forwarders:
            forwarders.end()


def config(addresses: list[str], here: int, ports: list[int]) -> str:
    """Return a worker's `TF_CONFIG`: itself, and its ways to the others."""
    workers = [
        f"{address if there == here else LOCALHOST}:{port}"
        for there, (address, port) in enumerate(
            zip(addresses, ports, strict=True)
        )
    ]
    return json.dumps(
        {
            "cluster": {"worker": workers},
            "task": {"type": "worker", "index": here},
        }
    )


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens at."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOCALHOST, 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def far_groups(
    net: hosts.Network | Loopback, commands: list[list[str]]
) -> Iterator[list[FarGroup]]:
    """Start a group for each command line; end them whatever happens."""
    with contextlib.ExitStack() as stack:
        started = []
        for arguments in commands:
            started.append(FarGroup(net, arguments))
            stack.callback(started[-1].end)
        yield started
