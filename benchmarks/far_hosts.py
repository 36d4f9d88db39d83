"""Workers with a chosen round trip between them.

    worker 0 ─ forwarder ── worker 1      worker 1 ─ forwarder ── worker 0

A worker listens at its own address, and reaches other workers by the ports of
its forwarder; see tf_optimizers/demo/link.py. On a `hosts.Network`, links have
a rate, too. `Loopback` needs no root.
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
        """Return a prefix for commands that run on a host."""
        return []


class FarGroup(hosts.Group):
    """One process of a script per host, with a round trip between hosts.

    Args:
        net: `Loopback`, or the network with the hosts.
        arguments: The script's path, and its arguments.
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
        """Set the round trip between workers from now on."""
        for forwarder in self.forwarders:
            forwarder.set(Link(round_trip=milliseconds / 1e3))

    def end(self) -> None:
        """End all processes."""
        super().end()
        for forwarder in self.forwarders:
            forwarder.close()


def free_ports(count: int) -> list[int]:
    """Return free ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOCALHOST, 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def far_groups(
    net: hosts.Network | Loopback, commands: list[list[str]]
) -> Iterator[list[FarGroup]]:
    """Start a group per command line; end all groups when the context ends."""
    with contextlib.ExitStack() as stack:
        started = []
        for arguments in commands:
            started.append(FarGroup(net, arguments))
            stack.callback(started[-1].end)
        yield started
