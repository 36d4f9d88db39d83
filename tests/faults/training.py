"""A training of two workers in the background of its observer."""

import json
import pathlib
import signal
import subprocess
import threading
import time

import real_workers

SCRIPT = pathlib.Path(__file__).with_name("train.py")
# In seconds; anything longer counts as a hang.
LIMIT = 480
OPTIMIZER = "DGCMomentum"


class Training:
    """A training under the launcher, which may restart it.

    Args:
        folder: An empty folder.
        restarts: The largest number of restarts.
        optimizer: One of `train.OPTIMIZERS`.
        standby: Whether processes stand by for a restart.
    """

    def __init__(self, folder, restarts=1, optimizer=OPTIMIZER, standby=False):
        self.folder = folder
        self.standby = ("--standby", "0") if standby else ()
        self.restarts = restarts
        self.optimizer = optimizer
        self.output = []
        self.launchers = []
        self.until = time.time() + LIMIT
        (folder / "backup").mkdir(exist_ok=True)
        self.start()

    def start(self):
        """Start the launcher, again after `kill_launcher`."""
        self.run(
            *(*real_workers.LAUNCHER, "--workers", "2"),
            *("--grace-period", "2", "--max-restarts", str(self.restarts)),
            *self.standby,
            *(str(SCRIPT), str(self.folder), self.optimizer),
        )

    def run(self, *command, **environment):
        """Start a process, and read its output."""
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=real_workers.environment(self.folder) | environment,
        )
        self.launchers.append(process)
        threading.Thread(
            target=self._read, args=(process,), daemon=True
        ).start()

    def _read(self, process):
        with process.stdout:
            for line in process.stdout:
                self.output.append((time.time(), line))

    def kill_launcher(self):
        """Kill the launcher; its watchdog kills the workers."""
        pids = [self.pid(place) for place in range(2)]
        self.launchers[-1].kill()
        self.launchers[-1].wait()
        while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
            time.sleep(0.05)

    def events(self, place=0):
        """Return the events of a worker so far."""
        path = self.folder / f"events-{place}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def pid(self, place):
        """Return the process id of the worker that now has a place."""
        return self.events(place)[-1]["pid"]

    def wait_for(self, condition):
        """Wait until a condition returns a true value; return that."""
        while not (found := condition()):
            if time.time() > self.until:
                raise TimeoutError(f"Nothing in {LIMIT} s:\n{self.text()}")
            time.sleep(0.02)
        return found

    def wait_for_step(self, step):
        """Wait until both workers have reached a step."""
        for place in range(2):
            self.wait_for(
                lambda place=place: any(
                    event["event"] == "step" and event["step"] >= step
                    for event in self.events(place)
                )
            )

    def wait(self):
        """Wait for the end; return the last launcher's exit code."""
        self.wait_for(lambda: self.launchers[-1].poll() is not None)
        return self.launchers[-1].returncode

    def text(self):
        """Return the output of workers and launchers."""
        return "".join(line for _, line in self.output)

    def noticed(self, since):
        """Return the time when the launcher reported a fault."""
        found = [
            at
            for at, line in self.output
            if at >= since and "Stopping all workers" in line
        ]
        return found[0] if found else None

    def close(self):
        """End all processes."""
        for process in self.launchers:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def reference(folder, optimizer=OPTIMIZER):
    """Return the weights of an undisturbed training."""
    training = Training(folder, restarts=0, optimizer=optimizer)
    try:
        if training.wait():
            raise RuntimeError(training.text())
        return training.events()[-1]["weights"]
    finally:
        training.close()
