"""Fixtures that write scripts and start the launcher."""

import os
import subprocess

import pytest
from launcher import LIMIT, Launcher
from real_workers import LAUNCHER, PACKAGE

from tf_optimizers.launch.gpus import OF_SLURM, VISIBLE
from tf_optimizers.launch.platforms import _SIGNS


@pytest.fixture
def write(tmp_path):
    """Write a script; return its path."""

    def write(*parts, name="script.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(parts))
        return str(path)

    return write


FAKE_TENSORFLOW = """
class config:
    cpus = []
    set_logical_device_configuration = lambda _, cpus: config.cpus.extend(cpus)
    list_physical_devices = lambda kind: [kind]
    list_logical_devices = lambda kind: config.cpus
    LogicalDeviceConfiguration = object
"""


@pytest.fixture
def fake_tensorflow(environment, tmp_path):
    """Replace TensorFlow, whose import takes seconds, by a small module."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "tensorflow.py").write_text(FAKE_TENSORFLOW)
    environment.setenv(
        "PYTHONPATH", f"{tmp_path / 'fake'}:{os.environ['PYTHONPATH']}"
    )


@pytest.fixture
def environment(monkeypatch):
    """Return the environment of tests, independent of the caller's."""
    signs = [name for names in _SIGNS.values() for name in names]
    signs += [*OF_SLURM, "SLURM_GPUS_ON_NODE", VISIBLE]
    for name in (*signs, "PYTHONSAFEPATH", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setenv("PYTHON_COLORS", "0")
    path = os.environ.get("PYTHONPATH")
    paths = [str(PACKAGE), *([path] if path else [])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return monkeypatch


@pytest.fixture
def launch(environment, tmp_path):
    """Run the launcher to its end."""

    def launch(*arguments, command=LAUNCHER, **options):
        options = {"cwd": tmp_path, "capture_output": True, **options}
        return subprocess.run(
            [*command, *arguments], timeout=LIMIT, check=False, **options
        )

    return launch


@pytest.fixture
def start(environment, tmp_path):
    """Start the launcher in the background."""
    started = []

    def start(*arguments, **options):
        started.append(Launcher(arguments, tmp_path, **options))
        return started[-1]

    yield start
    for launcher in started:
        launcher.close()
