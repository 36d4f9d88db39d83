"""The ends of workers, without remaining processes."""

import os
import resource
import signal
import time
from pathlib import Path

import pytest
from launcher import INDEX, LIMIT, LONG, assert_gone, lines_of, processes_with


def test_stopped_worker_can_clean_up(start, write, tmp_path):
    script = write(
        INDEX,
        "def clean(*_):\n"
        "    time.sleep(0.5)\n"
        "    print('cleaned', flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, clean)\n"
        "if index == 1:\n"
        "    while not os.path.exists('ready'): time.sleep(0.01)\n"
        "    sys.exit(7)\n"
        "print('ready', os.getpid(), flush=True)\n"
        f"time.sleep({LONG})\n",
    )
    launcher = start("--workers", "2", "--grace-period", str(LONG), script)
    pids = launcher.pids(1)
    (tmp_path / "ready").touch()
    assert launcher.process.stdout.read() == b"[worker 0] cleaned\n"
    assert launcher.wait() == 7
    assert_gone(pids, seconds=0)


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
print("ready", os.getpid(), child.pid, flush=True)
"""


INTERRUPT = pytest.param(signal.SIGINT, marks=pytest.mark.long)


@pytest.mark.parametrize("number", [None, INTERRUPT, signal.SIGTERM])
def test_stubborn_processes_are_killed_after_the_grace_period(
    start, write, tmp_path, number
):
    script = write(
        INDEX,
        STUBBORN,
        "while index == 0 or not os.path.exists('fail'): time.sleep(0.01)\n"
        "sys.exit(5)",
    )
    launcher = start("--workers", "2", "--grace-period", "1.5", script)
    pids = launcher.pids(2)
    assert len(pids) == 4
    began = time.monotonic()
    if number is None:
        (tmp_path / "fail").touch()
    else:
        launcher.process.send_signal(number)
    code = launcher.wait()
    assert code == (5 if number is None else 128 + number)
    assert 1.4 < time.monotonic() - began < LIMIT / 2
    assert_gone(pids)


@pytest.mark.usefixtures("without_guard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_kills_all_at_once(start, write, tmp_path, number):
    script = write(INDEX, STUBBORN, f"time.sleep({LONG})")
    launcher = start("--workers", "2", "--grace-period", str(LONG), script)
    launcher.pids(2)
    launcher.process.send_signal(number)
    launcher.wait_to_hear(f"Received {number.name}. Stopping all workers.")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 128 + number
    assert not processes_with(str(tmp_path))
    assert "Received SIGINT again. Killing all workers." in launcher.errors()


def test_second_hangup_shortens_no_grace_period(start, write, tmp_path):
    script = write(
        INDEX,
        "def end(number, frame):\n"
        "    print('asked', flush=True)\n"
        "    while not os.path.exists('end'): time.sleep(0.01)\n"
        "    sys.exit(print('cleaned', flush=True))\n"
        "signal.signal(signal.SIGHUP, end)\n"
        "print('ready', os.getpid(), flush=True)\n"
        f"time.sleep({LONG})\n",
    )
    launcher = start(
        *("--workers", "1", "--grace-period", str(LONG), script),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    launcher.pids(1)
    launcher.process.send_signal(signal.SIGHUP)
    assert launcher.process.stdout.readline() == b"[worker 0] asked\n"
    launcher.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)  # A second request would kill by now.
    (tmp_path / "end").touch()
    assert launcher.process.stdout.readline() == b"[worker 0] cleaned\n"
    assert launcher.wait() == 129


@pytest.mark.parametrize("code", [0, 4])
def test_children_of_a_worker_end_with_it(start, write, code):
    """A child may have any name.

    Linux cuts names at 15 bytes, here in the middle of a character."""
    script = write(
        INDEX,
        "import pathlib\n"
        "name = pathlib.Path('/proc/self/comm')\n"
        "name.write_bytes('worker'.encode() + 'é'.encode() * 5)\n"
        "child = os.fork()\n"
        f"if not child: time.sleep({LONG})\n"
        "print('ready', child, flush=True)\n"
        f"sys.exit({code})",
    )
    launcher = start("--workers", "1", script)
    pids = launcher.pids(1)
    assert launcher.wait() == code
    assert_gone(pids)


def test_children_of_an_ended_worker_do_not_wait_for_the_others(start, write):
    script = write(
        INDEX,
        f"if index: time.sleep({LONG})\n"
        f"child = subprocess.Popen(['sleep', '{LONG}'])\n"
        "print('ready', child.pid, flush=True)\n",
    )
    launcher = start("--workers", "2", script)
    assert_gone(launcher.pids(1))
    assert launcher.process.poll() is None


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
)
def test_signal_reaches_the_workers_and_ends_all(start, write, number):
    script = write(
        INDEX,
        "def end(number, frame):\n"
        "    print('signal', number, flush=True)\n"
        "    sys.exit(0)\n"
        f"signal.signal({number:d}, end)\n"
        f"child = subprocess.Popen(['sleep', '{LONG}'])\n"
        "print('ready', os.getpid(), child.pid, flush=True)\n"
        f"time.sleep({LONG})\n",
    )
    launcher = start(
        *("--workers", "2", "--grace-period", str(LONG), script),
        # The tests may run under `nohup`.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    pids = launcher.pids(2) + launcher.children()
    assert len(set(pids)) == 5  # Including the guard.
    launcher.process.send_signal(number)
    output = launcher.process.stdout.read()
    assert launcher.wait() == 128 + number
    for index in range(2):
        assert lines_of(output, index) == [b"signal %d" % number]
    assert f"[launcher] Received {number.name}." in launcher.errors()
    assert_gone(pids)


def test_hangup_is_ignored_under_nohup(start, write, tmp_path):
    script = write(
        INDEX,
        "print('ready', os.getpid(), flush=True)\n"
        "while not os.path.exists('end'): time.sleep(0.01)\n",
    )
    launcher = start(
        "--workers",
        "1",
        script,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    launcher.pids(1)
    launcher.process.send_signal(signal.SIGHUP)
    (tmp_path / "end").touch()
    assert launcher.wait() == 0


def test_killed_launcher_leaves_no_process(start, write):
    launcher = start(
        "--workers", "2", write(INDEX, STUBBORN, f"time.sleep({LONG})")
    )
    pids = launcher.pids(2)
    pids += launcher.children()
    assert len(set(pids)) == 5
    launcher.process.kill()
    assert_gone(pids)


def test_launcher_killed_at_its_start_leaves_no_process(start, write, tmp_path):
    script = write(INDEX, STUBBORN, f"time.sleep({LONG})")
    for delay in range(12):
        launcher = start("--workers", "3", script)
        while delay and len(launcher.children()) < min(delay, 4):
            assert launcher.process.poll() is None
        time.sleep(max(0, delay - 4) * 0.015)
        launcher.process.kill()
        launcher.wait()
        until = time.monotonic() + 20
        while left := processes_with(str(tmp_path)):
            assert time.monotonic() < until, left
            time.sleep(0.02)


def test_unread_output_does_not_keep_workers(start, write):
    script = write(
        INDEX,
        "print('ready', os.getpid(), flush=True)\n"
        "while True: print('x' * 1000)\n",
    )
    launcher = start("--workers", "2", script)
    pids = launcher.children()
    while len(pids) < 3:
        pids = launcher.children()
    launcher.process.stdout.readline()
    time.sleep(0.5)  # By now, the pipes are full.
    launcher.process.send_signal(signal.SIGTERM)
    assert_gone(pids[1:])
    # Messages on stderr do not wait for readers of stdout.
    launcher.wait_to_hear("Received SIGTERM. Stopping all workers.")
    # Unread output keeps the launcher alive until a second signal.
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait() == 143


# On a busy machine, the guard starts too late; here, it never starts.
WITHOUT_GUARD = """
import subprocess
class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        is_guard = command[-1] == "guard"
        super().__init__(["cat"] if is_guard else command, **options)
subprocess.Popen = Popen
"""


@pytest.fixture
def without_guard(environment, write):
    folder = Path(write(WITHOUT_GUARD, name="site/sitecustomize.py")).parent
    environment.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.mark.usefixtures("without_guard")
def test_failed_start_of_workers_leaves_no_process(launch, write, tmp_path):
    script = write(INDEX, STUBBORN, f"time.sleep({LONG})")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    run = launch(
        *["--workers", "12", script],
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (45, files[1])
        ),
    )
    assert run.returncode == 1
    assert b"[launcher] Cannot start 12 workers: [Errno 24]" in run.stderr
    assert not processes_with(str(tmp_path))
