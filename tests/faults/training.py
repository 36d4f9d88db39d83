"""A training of two workers that runs beside its observer."""

import json
import pathlib
import signal
import subprocess
import threading
import time

import real_workers

SCRIPT = pathlib.Path(__file__).with_name("train.py")
# In seconds: what takes longer, hangs.
LIMIT = 480
OPTIMIZER = "DGCMomentum"


class Training:
    """Started by the launcher, which may start it anew.

    Args:
        folder: An empty one.
        restarts: How often.
        optimizer: One of `train.OPTIMIZERS`.
    """

    def __init__(self, folder, restarts=1, optimizer=OPTIMIZER):
        self.folder = folder
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
            *("--restart-pause", "0"),
            *(str(SCRIPT), str(self.folder), self.optimizer),
        )

    def run(self, *command, **environment):
        """Start a process, and read what it puts out."""
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
        """Return what a worker has written so far."""
        path = self.folder / f"events-{place}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def pid(self, place):
        """Return the process of the worker that now has a place."""
        return self.events(place)[-1]["pid"]

    def wait_for(self, condition):
        """Return what a condition returns, once it is something."""
        while not (found := condition()):
            if time.time() > self.until:
                raise TimeoutError(f"Nothing in {LIMIT} s:\n{self.text()}")
            time.sleep(0.02)
        return found

    def wait_for_step(self, step):
        """Wait until both workers have come there."""
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
        """Return what was put out, by workers and launchers."""
        return "".join(line for _, line in self.output)

    def noticed(self, since):
        """Return when the launcher said after a time what was wrong."""
        found = [
            at
            for at, line in self.output
            if at >= since and "Stopping all workers" in line
        ]
        return found[0] if found else None

    def close(self):
        """Leave nobody behind."""
        for process in self.launchers:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def reference(folder, optimizer=OPTIMIZER):
    """Return the weights of a training that nothing happens to."""
    training = Training(folder, restarts=0, optimizer=optimizer)
    try:
        if training.wait():
            raise RuntimeError(training.text())
        return training.events()[-1]["weights"]
    finally:
        training.close()
