"""Runs a script of support/scripts in real worker processes on loopback."""

import json
import os
import pathlib
import subprocess
import sys

from quick_graphs import leave_graphs_as_traced

import tf_optimizers

SUPPORT = pathlib.Path(__file__).parent
SCRIPTS = SUPPORT / "scripts"
PACKAGE = pathlib.Path(tf_optimizers.__file__).parent.parent
# Several devices of a worker are logical CPUs, even on a machine with a GPU.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
LAUNCHER = [sys.executable, "-m", "tf_optimizers.launch"]
# Set for workers whose graphs TensorFlow does not optimize.
AS_TRACED = "TESTS_AS_TRACED"

if AS_TRACED in os.environ:
    leave_graphs_as_traced()


class Outcome:
    """The output and the results of workers.

    Args:
        exit_code: The launcher's exit code.
        output: The output of all workers and the launcher, interleaved.
        results: The result that each worker passed to `report`, or None.
    """

    def __init__(self, exit_code, output, results):
        self.exit_code, self.output, self.results = exit_code, output, results


def run(
    program,
    folder,
    workers,
    *arguments,
    devices=1,
    restarts=0,
    timeout=1800,
    optimized=False,
):
    """Run `program.py arguments...`; fail if it takes too long.

    Args:
        optimized: Whether TensorFlow optimizes the graphs of short tests, too.
    """
    command = [
        *LAUNCHER,
        *("--workers", str(workers), "--devices-per-worker", str(devices)),
        *("--max-restarts", str(restarts), "--restart-pause", "0"),
        *(str(SCRIPTS / f"{program}.py"), *map(str, arguments)),
    ]
    variables = environment(folder) | (NO_GPU if devices > 1 else {})
    if optimized:
        variables.pop(AS_TRACED, None)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=variables,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # The launcher ends its workers.
            output, _ = process.communicate(timeout=30)
            raise AssertionError(f"took over {timeout} s:\n{output}") from None
    # All scripts create a strategy, ours or TensorFlow's.
    assert "must train under one strategy" not in output, output[-5000:]
    results = [
        json.loads(path.read_text()) if path.exists() else None
        for path in (folder / f"{i}.json" for i in range(workers))
    ]
    return Outcome(process.returncode, output, results)


def environment(folder):
    """Return the environment of a worker that writes its result to a folder."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TF_CONFIG", "TF_OPTIMIZERS_RESTART")
    }
    return {
        **inherited,
        "PYTHONPATH": python_path(PACKAGE, SUPPORT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # On a machine with one GPU, all workers use it.
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        "FOLDER": str(folder),
    }


def python_path(*folders):
    """Return a `PYTHONPATH` of folders, followed by the tests' `PYTHONPATH`.

    The tests' `PYTHONPATH` may contain TensorFlow.
    """
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([given] if given else [])])


def results(*args, **kwargs):
    """Run a program that must succeed; return the results of the workers."""
    outcome = run(*args, **kwargs)
    assert outcome.exit_code == 0, outcome.output[-5000:]
    return outcome.results


def quick_python():
    """Return an environment in which importing Keras takes half the time."""
    return os.environ | {"PYTHONPATH": python_path(PACKAGE, SUPPORT)}


def output_of(code, *arguments, **options):
    """Run code in a new process, which must succeed; return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        **{"env": quick_python(), "capture_output": True} | options,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"[-5000:]
    return done.stdout


def report(result):
    """Write a worker's result for the test."""
    place = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    path = pathlib.Path(os.environ["FOLDER"]) / f"{place}.json"
    path.write_text(json.dumps(result))
