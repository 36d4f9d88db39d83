"""Groups of processes that stay alive, and run many programs."""

import contextlib
import importlib.util
import json
import os
import pathlib
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

WORKER = pathlib.Path(__file__).with_name("worker.py")
# Its `sitecustomize` lets Python start faster.
SUPPORT = WORKER.parents[1] / "support"
# The folder of the tested package, which is not imported here.
PACKAGE = pathlib.Path(
    importlib.util.find_spec("tf_optimizers").origin
).parents[1]
# Workers, and devices of each. The others are compared with "one".
PLACES = {
    "one": (1, 1),
    "1": (1, 1),
    "mirrored": (1, 2),
    "elsewhere": (1, 2),
    "devices": (1, 2),
    "2": (2, 1),
    "3": (3, 1),
    "2x2": (2, 2),
    "12": (12, 1),
}
# Messages that TensorFlow always writes.
NOISE = re.compile(r"port\.cc|cudart_stub|absl::InitializeLog|cuda_platform")
# Programs that a group runs before it is replaced: TensorFlow leaks memory.
LIFE = 80
# In seconds: how long a worker waits for one that has failed.
PATIENCE = 40
# In seconds: the largest delay between the ends of workers.
LATE = 45
PAUSE = 0.01
# Variable with the least slowdown, as the load of a machine changes.
AT_LEAST = "PROGRAMS_SLOWNESS"


class Group:
    """The processes of one place; they start with the first program."""

    def __init__(self, place, life=LIFE):
        self.place = place
        self.workers, self.devices = PLACES[place]
        self._life = life
        self._process = None
        self.end, self._words = "", ""
        # Whether its workers have always had the same outcome.
        self.is_clean = True

    def run(self, script, limit):
        """Return the result of a script on each worker, None if missing.

        If a worker does not answer within `limit` seconds, the group ends.
        """
        if self._process is None or self._number >= self._life:
            self._start()
            limit += 60  # The first program includes the import of TensorFlow.
        number, self._number = self._number, self._number + 1
        limit *= slowness()
        folder = self._folder / f"run-{number}"
        folder.mkdir()
        # A new file, since TensorFlow reads the source of traced functions.
        (self._folder / f"{number}.py").write_text(script)
        order = self._folder / "order.partial"
        order.write_text(json.dumps({"folder": str(folder)}))
        order.rename(self._folder / f"{number}.json")
        results = self._wait(number, time.monotonic() + limit)
        shutil.rmtree(folder, ignore_errors=True)
        if None in results:
            self.close()
        elif len({_class_of(result["error"]) for result in results}) > 1:
            self.is_clean = False
        return results

    def _start(self):
        self.close()
        self._number, self.is_clean, self.end = 0, True, ""
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="programs-"))
        command = [str(WORKER), str(self._folder), str(self.devices)]
        if self.workers > 1:
            counts = str(self.workers), str(self.devices)
            command = [
                *("-m", "tf_optimizers.launch", "--workers", counts[0]),
                *("--devices-per-worker", counts[1], *command),
            ]
        self.output = self._folder / "output"
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                cwd=self._folder,
                start_new_session=True,
            )

    def _wait(self, number, until):
        """Return all results, or those that are there in time."""
        paths = [
            self._folder / f"{number}-{index}.pickle"
            for index in range(self.workers)
        ]
        first = None
        process = self._process  # Another thread may close the group.
        while not all(there := [path.exists() for path in paths]):
            if process is None or process.poll() is not None:
                self.end = f"exit code {process and process.returncode}"
                break
            if time.monotonic() > until:
                self.end = "no answer in time"
                break
            if any(there):
                first = first or time.monotonic()
                until = min(until, first + LATE * slowness())
            time.sleep(PAUSE)
        return [
            pickle.loads(path.read_bytes()) if path.exists() else None
            for path in paths
        ]

    def last_words(self):
        """Return the exit of the processes, and their last output."""
        if self._process is None:
            return self._words
        written = self.output.read_text(errors="replace").splitlines()
        told = [line for line in written if not NOISE.search(line)]
        return "\n".join([self.end, *told[-20:]])

    def close(self):
        """End the processes."""
        if self._process is None:
            return
        self._words = self.last_words()
        # Another thread may close the group at the same time.
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()  # The launcher ends its workers.
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()  # Its watchdog ends the workers.
            process.wait()
        # Pools that a program has not closed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)


def slowness():
    """Return the slowdown by other work on the machine."""
    at_least = float(os.environ.get(AT_LEAST, 1.0))
    return max(at_least, os.getloadavg()[0] / os.cpu_count())


def _class_of(error):
    return error and error["class"]


def _environment():
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TF_CONFIG", "TF_OPTIMIZERS_RESTART")
    }
    paths = [SUPPORT, PACKAGE, os.environ.get("PYTHONPATH", "")]
    environment = {
        **inherited,
        "PROGRAMS_OWNER": str(os.getpid()),
        "PROGRAMS_PATIENCE": str(PATIENCE * slowness()),
        "PYTHONPATH": os.pathsep.join(map(str, paths)).rstrip(os.pathsep),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONWARNINGS": "ignore",
    }
    if "TENSORFLOW_DEFAULTS" not in os.environ:
        # To look for oneDNN's kernels takes a twentieth of the time.
        environment.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    return environment
