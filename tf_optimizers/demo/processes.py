"""Starts the worker processes of a part of the demo, and shows progress."""

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence

from tqdm import tqdm

# At the beginning and the end of a run, the first worker prints these words and
# the name of the run. During the run, it repeats `BEGIN` with the name and the
# seconds left. The progress bar shows the text after `BEGIN`.
BEGIN = "begin run: "
END = "end run: "

LAUNCHER = [sys.executable, "-m", "tf_optimizers.launch"]
_FIRST_WORKER = "[worker 0] "
_SHOWN_LINES = 60


class WorkersError(RuntimeError):
    """The workers failed, or took too long."""


def run_workers(
    command: Sequence[str], workers: int, limit: float, progress: tqdm
) -> None:
    """Run a module in several local processes, and wait for them.

    Args:
        command: The module and its arguments.
        workers: The number of processes.
        limit: Seconds until the workers are stopped.
        progress: The bar to advance when the first worker prints `END`.

    Raises:
        WorkersError: If a worker fails, or the limit is exceeded.
    """
    process = subprocess.Popen(
        [*LAUNCHER, "--workers", str(workers), "-m", *command],
        # There may be fewer GPUs than workers.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.terminate()

    timer = threading.Timer(limit, expire)
    with process:
        timer.start()
        try:
            output = follow(process.stdout or [], progress)
            code = process.wait()
        finally:
            timer.cancel()
            # If the launcher is still running, SIGTERM makes it end its
            # workers.
            process.terminate()
    if code == 0:
        return
    rule, received = "end without an error", f"exit code {code}"
    if expired.is_set():
        rule, received = f"end within {limit:g} s", "workers still running"
    raise WorkersError(
        f"The {workers} workers of the demo must {rule}. Received: {received}. "
        f"See the end of their output:\n{''.join(output)}"
    )


def follow(lines: Iterable[str], progress: tqdm) -> deque[str]:
    """Show progress from lines of the workers' output; return other lines.

    Only the last `_SHOWN_LINES` of these are returned.
    """
    others: deque[str] = deque(maxlen=_SHOWN_LINES)
    for line in lines:
        text = line.removeprefix(_FIRST_WORKER).rstrip("\n")
        if text.startswith(BEGIN):
            progress.set_description_str(text.removeprefix(BEGIN))
        elif text.startswith(END):
            progress.update()
        else:
            others.append(line)
    return others
