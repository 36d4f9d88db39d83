"""Several hosts on one machine, joined by a network of a chosen speed.

    host 0 ── link ─┐
    host 1 ── link ─┼─ switch
    host 2 ── link ─┘

A host is a network namespace with one process per group. Its link is a pair of
virtual interfaces; both ends send at most at the link's rate (`tc tbf`). This
needs Linux, root and iproute2. The context manager `network` removes everything
when it ends.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# The rate and burst for tc. A burst is at least the bytes that are sent in a
# tick of the kernel's clock.
LINKS = {
    "10 Mbit/s": ("10mbit", "16kb"),
    "100 Mbit/s": ("100mbit", "64kb"),
    "1 Gbit/s": ("1gbit", "512kb"),
    "10 Gbit/s": ("10gbit", "4mb"),
}
INTERFACE = "eth0"
# Counts all bytes that a namespace has sent, with packet headers.
COUNTER = pathlib.Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
PORT = 2222


def run(*command: str) -> None:
    """Run a command; if it fails, raise an error with its error output."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")


class Network:
    """The namespaces of `network`."""

    def __init__(self, hosts: int) -> None:
        # The process id distinguishes networks on one machine.
        self.switch = f"switch{os.getpid()}"
        self.hosts = [f"host{i}-{os.getpid()}" for i in range(hosts)]
        self.addresses = [f"10.0.0.{i + 1}" for i in range(hosts)]

    def build(self) -> None:
        """Create namespaces and links, without a limit on speed."""
        for name in (self.switch, *self.hosts):
            run("ip", "netns", "add", name)
            self.within(name, "ip", "link", "set", "lo", "up")
        self.within(self.switch, *"ip link add bridge type bridge".split())
        self.within(self.switch, *"ip link set bridge up".split())
        for i, (host, address) in enumerate(
            zip(self.hosts, self.addresses, strict=True)
        ):
            port = f"port{i}"
            pair = f"ip link add {INTERFACE} type veth peer name {port}"
            self.within(host, *pair.split(), "netns", self.switch)
            address = f"ip address add {address}/24 dev {INTERFACE}"
            self.within(host, *address.split())
            self.within(host, "ip", "link", "set", INTERFACE, "up")
            for rest in ("master bridge", "up"):
                plug = f"ip link set {port} {rest}"
                self.within(self.switch, *plug.split())

    def shape(self, link: str) -> None:
        """Set the speed of every link; `link` is a key of `LINKS`."""
        rate, burst = LINKS[link]
        shaping = f"root tbf rate {rate} burst {burst} latency 50ms".split()
        replace = "tc qdisc replace dev".split()
        for i, host in enumerate(self.hosts):
            self.within(host, *replace, INTERFACE, *shaping)
            self.within(self.switch, *replace, f"port{i}", *shaping)

    def within(self, name: str, *command: str) -> None:
        run(*self.enter(name), *command)

    def enter(self, name: str) -> list[str]:
        """Return a prefix for commands that run in a namespace."""
        return ["ip", "netns", "exec", name]

    def remove(self) -> None:
        """Delete the namespaces, and their links with them."""
        for name in (*self.hosts, self.switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextlib.contextmanager
def network(hosts: int) -> Iterator[Network]:
    """Build a network, and remove it when the context ends."""
    net = Network(hosts)
    try:
        net.build()
        yield net
    finally:
        net.remove()


class Group:
    """One process of a script per host; all processes answer together.

    Args:
        net: The network, with as many hosts as there are workers.
        port: A port that no other group uses.
        arguments: The script's path, and its arguments.
    """

    def __init__(self, net: Network, port: int, arguments: list[str]) -> None:
        cluster = {"worker": [f"{a}:{port}" for a in net.addresses]}
        self.processes = [
            subprocess.Popen(
                [*net.enter(host), sys.executable, *arguments],
                env={
                    **os.environ,
                    "TF_CONFIG": json.dumps(
                        {
                            "cluster": cluster,
                            "task": {"type": "worker", "index": i},
                        }
                    ),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for i, host in enumerate(net.hosts)
        ]

    def ask(self, **question: Any) -> list[Any]:
        """Ask all workers at once; return their answers."""
        for process in self.processes:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            raise RuntimeError(
                "All workers must answer. Received: the end of a worker that "
                f"was asked for {question}."
            )
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()


@contextlib.contextmanager
def groups(net: Network, commands: Sequence[list[str]]) -> Iterator[list]:
    """Start a group per command line; end all groups when the context ends."""
    with contextlib.ExitStack() as stack:
        started = []
        for i, arguments in enumerate(commands):
            started.append(Group(net, PORT + i, arguments))
            stack.callback(started[-1].end)
        yield started


def answer(functions: dict[str, Callable]) -> None:
    """Answer questions, in a worker, until the standard input ends.

    Only answers go to the standard output. Other output is redirected to the
    standard error, since TensorFlow and Python may print anything.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        question = json.loads(line)
        function = functions[question.pop("function")]
        answers.write(json.dumps(function(**question)) + "\n")
        answers.flush()


def sent() -> int:
    """Return the bytes that this host's interface has sent."""
    return int(COUNTER.read_text())


def end_on_signals() -> None:
    """Let signals unwind the stack, so that networks are removed."""

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
