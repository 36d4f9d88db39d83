"""The first failure stops all workers, which may be restarted."""

import itertools
import os
import signal
import types
from pathlib import Path

import pytest
from launcher import (
    INDEX,
    LONG,
    assert_gone,
    lines_of,
)

from tf_optimizers.launch.group import first_failure, pauses

FAILURES = {
    "sys.exit(3)": (3, "Worker 1 failed with exit code 3"),
    "os._exit(255)": (255, "Worker 1 failed with exit code 255"),
    "sys.exit('no data')": (1, "Worker 1 failed with exit code 1"),
    "raise ValueError('no data')": (1, "Worker 1 failed with exit code 1"),
    "os.kill(os.getpid(), signal.SIGKILL)": (
        137,
        "Worker 1 was killed by signal 9",
    ),
    "os.kill(os.getpid(), signal.SIGSEGV)": (
        139,
        "Worker 1 was killed by signal 11",
    ),
    "os.kill(os.getpid(), signal.SIGRTMIN + 1)": (
        163,
        "Worker 1 was killed by signal 35",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_first_failure_stops_all_and_is_the_exit_code(launch, write, failure):
    # Worker 2 ends normally before worker 1 fails, or soon after.
    script = write(
        INDEX,
        "if index == 1:\n"
        "    while len(os.listdir('pids')) < 3: time.sleep(0.01)\n"
        f"    {failure}\n"
        "open(f'pids/{os.getpid()}', 'w').close()\n"
        "if index != 2:\n"
        f"    time.sleep({LONG})\n",
    )
    folder = Path(script).with_name("pids")
    folder.mkdir()
    (folder / "placeholder").touch()
    run = launch("--workers", "3", "--grace-period", str(LONG), script)
    code, description = FAILURES[failure]
    assert run.returncode == code
    said = [
        line
        for line in run.stderr.decode().splitlines()
        if line.startswith("[launcher]")
    ]
    assert len(said) == 1
    assert said[0].startswith(f"[launcher] {description}")
    if "no data" in failure:
        assert lines_of(run.stderr, 1)[-1].endswith(b"no data")
    (folder / "placeholder").unlink()
    assert_gone([int(name) for name in os.listdir(folder)], seconds=0)


RESTARTING = (
    INDEX,
    "print(restart, *cluster['cluster']['worker'], flush=True)\n"
    "if index == 1 and restart < 2: os.kill(os.getpid(), signal.SIGKILL)\n"
    f"if restart < 2: time.sleep({LONG})\n",
)


def test_failed_worker_is_restarted_with_all_others(launch, write):
    script = write(*RESTARTING)
    run = launch("--workers", "2", "--max-restarts", "2", script)
    assert run.returncode == 0
    lines = [line.split() for line in lines_of(run.stdout, 1)]
    assert [line[0] for line in lines] == [b"0", b"1", b"2"]
    assert [line.split() for line in lines_of(run.stdout, 0)][-1] == lines[-1]
    killed = (
        "[launcher] Worker 1 was killed by signal 9 (Killed). "
        "Stopping all workers."
    )
    assert run.stderr.decode().splitlines() == [
        killed,
        "[launcher] Restart 1 of 2 in 0.1 s.",
        killed,
        "[launcher] Restart 2 of 2 in 0.2 s.",
    ]


def test_workers_restart_after_the_guard_was_killed(launch, write):
    script = write(
        INDEX,
        "launcher = os.getppid()\n"
        "with open(f'/proc/{launcher}/task/{launcher}/children') as file:\n"
        "    children = file.read().split()\n"
        "if restart == 0:\n"
        "    for pid in children:\n"
        "        with open(f'/proc/{pid}/cmdline') as file:\n"
        "            is_guard = file.read().endswith('guard\\0')\n"
        "        if is_guard: os.kill(int(pid), signal.SIGKILL)\n"
        "    time.sleep(0.5)\n"
        "    sys.exit(3)\n"
        "print('restarted')\n",
    )
    run = launch(
        *("--workers", "1", "--max-restarts", "1"),
        *("--restart-pause", "0", script),
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == b"[worker 0] restarted\n"


def test_exit_code_after_all_restarts_is_that_of_the_last_start(launch, write):
    script = write(INDEX, "sys.exit(3 + restart)")
    run = launch(
        *("--workers", "1", "--max-restarts", "1"),
        *("--restart-pause", "0", script),
    )
    assert run.returncode == 4
    assert run.stderr.count(b"Restart") == 1
    assert b"failed with exit code 4" in run.stderr


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (1.0, [1, 2, 4, 8, 16, 32, 60, 60]),
        (0.0, [0] * 8),
        (100.0, [100] * 8),
    ],
)
def test_pause_doubles_with_every_restart_up_to_a_minute(first, expected):
    assert list(itertools.islice(pauses(first), 8)) == expected


def test_signal_ends_the_pause_before_a_restart(start, write):
    script = write("import sys; print('failing', flush=True); sys.exit(3)")
    launcher = start(
        *("--workers", "1", "--max-restarts", "1"),
        *("--restart-pause", str(LONG), script),
    )
    launcher.wait_to_hear(f"Restart 1 of 1 in {LONG} s.")
    launcher.process.terminate()
    assert launcher.process.stdout.read() == b"[worker 0] failing\n"
    assert launcher.wait() == 3
    assert "Received SIGTERM. There will be no restart." in launcher.errors()


def test_signal_while_workers_are_stopped_prevents_the_restart(
    start, write, tmp_path
):
    script = write(
        INDEX,
        "if index == 1:\n"
        "    while not os.path.exists('armed'): time.sleep(0.01)\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "open('armed', 'w').close()\n"
        "while not os.path.exists('end'): time.sleep(0.01)\n",
    )
    launcher = start(
        *("--workers", "2", "--grace-period", str(LONG)),
        *("--max-restarts", "5", script),
    )
    assert launcher.process.stdout.readline() == b"[worker 0] asked\n"
    launcher.process.terminate()
    launcher.wait_to_hear("Received SIGTERM. There will be no restart.")
    (tmp_path / "end").touch()
    assert launcher.wait() == 3
    assert "Restart" not in launcher.errors()


def test_failure_names_workers_that_had_ended(launch, write):
    """Workers that train together fail if one of them ends too early."""
    script = write(
        INDEX,
        "import pathlib\n"
        "if index == 0:\n"
        "    pathlib.Path('process').symlink_to(f'/proc/{os.getpid()}')\n"
        "else:\n"
        "    while not os.path.lexists('process'): time.sleep(0.01)\n"
        "    while os.path.exists('process'): time.sleep(0.01)\n"
        "    sys.exit(3)\n",
    )
    run = launch("--workers", "2", script)
    assert run.stderr.decode() == (
        "[launcher] Worker 1 failed with exit code 3. Worker 0 had exited with "
        "code 0. Stopping all workers.\n"
    )


@pytest.mark.parametrize(("code", "grace"), [(1, 10), (137, 10), (143, 30)])
def test_workers_have_time_for_a_backup_unless_one_has_failed(code, grace):
    worker = types.SimpleNamespace(exit_code=code, describe_end=lambda: "")
    failure = first_failure([worker], None, None)
    assert (failure.exit_code, failure.usual_grace) == (code, grace)
    assert failure.may_restart
    worker.exit_code = None
    failure = first_failure([worker], signal.SIGTERM, None)
    assert failure.usual_grace == 30
    assert not failure.may_restart
