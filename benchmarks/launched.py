"""Workers of a benchmark on this machine, joined by loopback."""

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any


def run(script: str, workers: int, *arguments: str) -> Any:
    """Run a script as several workers; return the first worker's output.

    Args:
        script: The script's path. It writes JSON to the path after `--output`.
        workers: Number of processes.
        *arguments: Arguments of the script.

    Raises:
        RuntimeError: If a worker fails; the message is the workers' output.
    """
    launch = ["-m", "tf_optimizers.launch", "--workers", str(workers)]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "result.json"
        own = [script, *arguments, "--output", str(path)]
        done = subprocess.run(
            [sys.executable, *launch, *own], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return json.loads(path.read_text())
