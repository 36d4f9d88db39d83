"""Workers that are a chosen round trip apart.

    worker 0 ─ forwarder ── worker 1      worker 1 ─ forwarder ── worker 0

A worker listens at its own address, and knows of the others the ports of a
forwarder beside it; see tf_optimizers/demo/link.py. On a `hosts.Network` links
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

from tf_optimizers.demo.link import LOCALHOST, Link, detour


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
        ports = free_ports(len(net.hosts))
        workers = [
            f"{address}:{port}"
            for address, port in zip(net.addresses, ports, strict=True)
        ]
        self.forwarders, self.processes = [], []
        for here, host in enumerate(net.hosts):
            config = {
                "cluster": {"worker": workers},
                "task": {"type": "worker", "index": here},
            }
            forwarder, config = detour(config, net.enter(host))
            self.forwarders.append(forwarder)
            self.processes.append(
                subprocess.Popen(
                    [*net.enter(host), sys.executable, *arguments],
                    env=os.environ | {"TF_CONFIG": json.dumps(config)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def set_round_trip(self, milliseconds: float) -> None:
        """Move the workers apart, from now on."""
        for forwarder in self.forwarders:
            forwarder.set(Link(round_trip=milliseconds / 1e3))

    def end(self) -> None:
        """End all processes."""
        super().end()
        for forwarder in self.forwarders:
            forwarder.close()


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
