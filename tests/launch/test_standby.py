"""Processes that stand by take over when a worker fails."""

import json
import os
import signal

import pytest
from launcher import INDEX, LONG, assert_gone, lines_of, processes_with
from test_environment import (
    ARGUMENTS,
    LINK,
    PACKAGE_MAIN,
    SCRIPT,
    SURROUNDINGS,
    plain_lines,
)

from tf_optimizers.launch import child

# Stands in for the libraries, which take seconds to load.
LOADED = f"""
import os, pathlib, sys, types
if "stand-by" in sys.orig_argv:
    for name in {child.LIBRARIES}:
        sys.modules[name] = types.ModuleType(name)
    # With another backend, tf_optimizers raises an ImportError.
    failing = {{"jax": "tf_optimizers.callbacks", "missing": "keras"}}
    if "BACKEND" in os.environ:
        sys.modules[failing[os.environ["BACKEND"]]] = None
    os.close(os.open(f"standby-{{os.getpid()}}", os.O_CREAT))
"""
# The first workers fail when as many processes stand by as there are workers.
STANDBYS = """
def standbys():
    return [name for name in os.listdir() if name.startswith("standby")]
"""
FAILS_ONCE = (
    *(INDEX, STANDBYS),
    "if restart == 0:\n"
    "    while len(standbys()) < 2: time.sleep(0.01)\n"
    "    if index == 1: sys.exit(3)\n"
    f"    time.sleep({LONG})\n",
)
OPTIONS = ("--restart-pause", "0", "--max-restarts")


@pytest.fixture(autouse=True)
def loaded(environment, write):
    """Let processes that stand by load their libraries at once."""
    write(LOADED, name="site/sitecustomize.py")
    folder = os.path.dirname(write("", name="site/nothing"))
    environment.setenv("PYTHONPATH", folder, prepend=os.pathsep)


def standbys(folder):
    """Return the processes that have stood by."""
    return {int(p.name.split("-")[1]) for p in folder.glob("standby-*")}


SAYS = (
    "print(os.getpid(), restart, 'tensorflow' in sys.modules,\n"
    "    *cluster['cluster']['worker'], flush=True)\n"
)


def test_next_attempt_runs_in_the_processes_that_stand_by(
    launch, write, tmp_path
):
    run = launch(
        *("--workers", "2", *OPTIONS, "1", "--standby", "0"),
        write(*FAILS_ONCE, SAYS),
    )
    assert run.returncode == 0, run.stderr
    lines = [lines_of(run.stdout, index) for index in range(2)]
    [(first, *places), (second, *others)] = [line[0].split() for line in lines]
    assert {int(first), int(second)} == standbys(tmp_path)
    assert places == others
    assert places[:2] == [b"1", b"True"]
    assert not processes_with(str(tmp_path))


def test_every_restart_has_its_own_and_the_last_attempt_none(
    launch, write, tmp_path
):
    script = write(
        *(INDEX, STANDBYS),
        "while len(standbys()) < min(2, restart + 1): time.sleep(0.01)\n",
        SAYS,
        "time.sleep(0.5)\n"  # Time for one process too many.
        "sys.exit(3)\n",
    )
    run = launch("--workers", "1", *OPTIONS, "2", "--standby", "0", script)
    assert run.returncode == 3, run.stderr
    pids = [int(line.split()[0]) for line in lines_of(run.stdout, 0)]
    assert len(pids) == 3
    assert set(pids[1:]) == standbys(tmp_path)


def test_none_stand_by_before_their_time(launch, write, tmp_path):
    script = write("import sys; sys.exit(3)")
    run = launch(
        *("--workers", "2", *OPTIONS, "1", "--standby", str(LONG), script)
    )
    assert run.returncode == 3, run.stderr
    assert not standbys(tmp_path)


# Stands in for TensorFlow in processes that do not stand by.
SPLITTING = """
class config:
    LogicalDeviceConfiguration = object
    list_physical_devices = staticmethod(lambda kind: [kind])
    set_logical_device_configuration = staticmethod(lambda *_: print("split"))
"""


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("backend", ["jax", "missing"])
def test_process_without_usable_libraries_starts_afresh(
    launch, write, environment, tmp_path, backend, devices
):
    environment.setenv("BACKEND", backend)
    write(SPLITTING, name="site/tensorflow.py")
    run = launch(
        *("--workers", "2", *OPTIONS, "1", "--standby", "0"),
        *("--devices-per-worker", str(devices)),
        write(
            *FAILS_ONCE, "print(os.getpid(), restart, 'keras' in sys.modules)"
        ),
    )
    assert run.returncode == 0, run.stderr
    for index in range(2):
        *splits, line = lines_of(run.stdout, index)
        assert splits == [b"split"] * (2 * (devices - 1))  # In both attempts.
        pid, restart, is_loaded = line.split()
        assert int(pid) in standbys(tmp_path)
        assert (restart, is_loaded) == (b"1", b"False")


def test_killed_process_is_replaced(launch, write, tmp_path):
    script = write(
        *(INDEX, STANDBYS),
        "if restart == 0:\n"
        "    while not standbys(): time.sleep(0.01)\n"
        "    os.kill(int(standbys()[0].split('-')[1]), signal.SIGKILL)\n"
        "    time.sleep(0.2)\n"
        "    sys.exit(3)\n",
        SAYS,
    )
    run = launch("--workers", "1", *OPTIONS, "1", "--standby", "0", script)
    assert run.returncode == 0, run.stderr
    [line] = lines_of(run.stdout, 0)
    assert int(line.split()[0]) not in standbys(tmp_path)
    assert line.split()[1:3] == [b"1", b"False"]


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGKILL])
def test_processes_that_stand_by_end_with_the_launcher(
    start, write, tmp_path, number
):
    script = write(
        *(INDEX, STANDBYS),
        "while len(standbys()) < 2: time.sleep(0.01)\n"
        "print('ready', os.getpid(), flush=True)\n"
        "while not os.path.exists('end'): time.sleep(0.01)\n",
    )
    launcher = start("--workers", "2", *OPTIONS, "5", "--standby", "0", script)
    pids = launcher.pids(2) + launcher.children()
    assert len(set(pids)) == 5  # Including the guard.
    if number is None:
        (tmp_path / "end").touch()
    else:
        launcher.process.send_signal(number)
    launcher.wait()
    assert_gone(pids)


AGAIN = """
import os, sys, time
if os.environ.get("TF_OPTIMIZERS_RESTART") == "0":
    while not [n for n in os.listdir() if n[:7] == "standby"]: time.sleep(0.01)
    sys.exit(3)
os.environ.pop("TF_OPTIMIZERS_RESTART", None)
"""


@pytest.mark.parametrize("safe_path", ["", "1"])
@pytest.mark.parametrize("command", [SCRIPT, LINK, PACKAGE_MAIN], ids=" ".join)
def test_script_sees_what_plain_python_shows(
    launch, write, environment, tmp_path, command, safe_path
):
    document = "'''Documented.'''"
    surroundings = SURROUNDINGS.replace('"tensorflow"', '"fake"')
    script = write(AGAIN, surroundings, name="inner/script.py")
    write(document, AGAIN, surroundings, name="inner/__main__.py")
    write("", name="inner/__init__.py")
    plain = plain_lines(script, environment, tmp_path, command, safe_path)
    run = launch(
        *("--workers", "1", *OPTIONS, "1", "--standby", "0"),
        *(*command, *ARGUMENTS),
    )
    assert run.returncode == 0, run.stderr
    seen, expected = (
        json.loads(text) for text in (lines_of(run.stdout, 0)[0], plain[0])
    )
    assert seen == expected
    assert standbys(tmp_path)
