"""Two workers on separate hosts, with a cable that can be cut.

The hosts are network namespaces, which need root.
"""

import json
import shutil
import subprocess
import sys
import time

from faults.cases import GOES_ON, RESUMES
from faults.training import SCRIPT, Training

HOSTS = ["faults-0", "faults-1"]
ADDRESSES = ["10.91.0.1", "10.91.0.2"]
PORT = 23456


class Network(Training):
    """A training without a launcher, so without restarts."""

    def __init__(self, folder):
        self._ended = None
        lay_cable()
        super().__init__(folder)

    def start(self):
        """Start a worker on each host."""
        cluster = {"worker": [f"{address}:{PORT}" for address in ADDRESSES]}
        for place, host in enumerate(HOSTS):
            task = {"type": "worker", "index": place}
            self.run(
                *("ip", "netns", "exec", host),
                *(
                    sys.executable,
                    str(SCRIPT),
                    str(self.folder),
                    self.optimizer,
                ),
                TF_CONFIG=json.dumps({"cluster": cluster, "task": task}),
            )

    def wait(self):
        """Wait for the end of both workers; return the worse exit code."""
        last = self.launchers[-2:]
        self.wait_for(lambda: all(p.poll() is not None for p in last))
        return max(abs(process.returncode) for process in last)

    def wait_for_errors(self):
        """Wait until both workers have given up, and record the time."""
        if not self.wait():
            raise RuntimeError(f"It went on:\n{self.text()}")
        self._ended = time.time()

    def noticed(self, since):
        """Return the time when both workers had given up."""
        return self._ended

    def close(self):
        """End all processes."""
        super().close()
        remove_hosts()


def lay_cable():
    """Join two hosts."""
    remove_hosts()
    for host in HOSTS:
        ip("netns", "add", host)
    ip(
        *("link", "add", "eth0", "netns", HOSTS[0], "type", "veth"),
        *("peer", "name", "eth0", "netns", HOSTS[1]),
    )
    for host, address in zip(HOSTS, ADDRESSES, strict=True):
        ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", host, "link", "set", device, "up")


def missing():
    """Return the reason why hosts cannot be created, or None."""
    if shutil.which("ip") is None:
        return "needs the command `ip`"
    try:
        lay_cable()
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces ({error})"
    remove_hosts()
    return None


def remove_hosts():
    """Remove hosts that an earlier run may have left."""
    known = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout.split()
    for host in set(HOSTS) & set(known):
        ip("netns", "delete", host)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


def plug(state):
    ip("-n", HOSTS[0], "link", "set", "eth0", state)


def cut_for_a_while(training):
    plug("down")
    time.sleep(3)
    plug("up")


def cut(training):
    """Cut the network permanently; then repair it, and start again."""
    plug("down")
    training.wait_for_errors()
    plug("up")
    training.start()


CASES = {
    "network down for 3 s": (cut_for_a_while, GOES_ON, ""),
    "network down permanently": (cut, RESUMES, ""),
}
