"""The launcher, with real processes: what workers see, say, and how they end.

Most scripts do without TensorFlow, as the launcher does: a second instead of
ten.
"""

import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launched import LAUNCHER

import tf_optimizers
from tf_optimizers.launch.__main__ import split
from tf_optimizers.launch.group import pauses
from tf_optimizers.launch.output import whole_lines

PACKAGE = Path(tf_optimizers.__file__).parent
# In seconds; far above what is needed, as other work may share the machine.
LIMIT = 300
# For a SIGTERM that should not be needed or a worker that should not end.
LONG = 600

INDEX = """
import json, os, signal, subprocess, sys, time
cluster = json.loads(os.environ["TF_CONFIG"])
index = cluster["task"]["index"]
"""


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
    """Where it matters only that TensorFlow is loaded: it takes seconds."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "tensorflow.py").write_text(FAKE_TENSORFLOW)
    environment.setenv(
        "PYTHONPATH", f"{tmp_path / 'fake'}:{os.environ['PYTHONPATH']}"
    )


@pytest.fixture
def environment(monkeypatch):
    """What the tests depend on, whatever the caller's is."""
    for name in ("TF_CONFIG", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setenv("PYTHON_COLORS", "0")
    path = os.environ.get("PYTHONPATH")
    paths = [str(PACKAGE.parent), *([path] if path else [])]
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


class Launcher:
    """A launcher that runs beside the test, killed at the test's end."""

    def __init__(self, arguments, folder, **options):
        self.error_file = folder / f"stderr-{time.monotonic_ns()}"
        with self.error_file.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*LAUNCHER, *arguments],
                cwd=folder,
                stderr=stderr,
                **{"stdout": subprocess.PIPE, **options},
            )
        # No read or wait below can then last longer.
        self._timer = threading.Timer(LIMIT, self.process.kill)
        self._timer.start()

    def pids(self, count):
        """Return what the next `count` lines `ready pid ...` report."""
        found = []
        for _ in range(count):
            line = self.process.stdout.readline()
            assert b"ready" in line, self.errors()
            found += map(int, line.split()[3:])
        return found

    def children(self):
        pid = self.process.pid
        return pids_in(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def errors(self):
        return self.error_file.read_text()

    def wait_to_hear(self, text):
        has_ended = False
        while f"[launcher] {text}\n" not in self.errors():
            assert not has_ended, self.errors()
            has_ended = self.process.poll() is not None
            time.sleep(0.01)

    def wait(self):
        return self.process.wait()

    def close(self):
        self.process.kill()
        self.process.wait()
        self._timer.cancel()
        self._timer.join()
        if self.process.stdout:
            self.process.stdout.close()


@pytest.fixture
def start(environment, tmp_path):
    """Start the launcher, and go on."""
    started = []

    def start(*arguments, **options):
        started.append(Launcher(arguments, tmp_path, **options))
        return started[-1]

    yield start
    for launcher in started:
        launcher.close()


def pids_in(text):
    return [int(word) for word in text.split()]


def is_alive(pid):
    """Tell a process that runs from none, and from one nobody waits for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def assert_gone(pids, seconds=20):
    assert pids
    until = time.monotonic() + seconds
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < until, f"Still running: {left}."
        time.sleep(0.02)


def lines_of(output, worker):
    """Return one worker's lines, without their prefix."""
    prefix = f"[worker {worker}] ".encode()
    found = [line for line in output.split(b"\n") if line.startswith(prefix)]
    return [line[len(prefix) :] for line in found]


# What a worker sees.


def test_worker_is_told_its_place_in_the_cluster(launch, write):
    script = write("import os; print(os.environ['TF_CONFIG'])")
    run = launch("--workers", "3", script)
    assert run.returncode == 0, run.stderr
    configs = [json.loads(*lines_of(run.stdout, index)) for index in range(3)]
    assert [config.pop("task") for config in configs] == [
        {"type": "worker", "index": index} for index in range(3)
    ]
    assert configs[0] == configs[1] == configs[2]
    addresses = configs[0]["cluster"].pop("worker")
    assert configs[0] == {"cluster": {}}
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", name) for name in addresses)
    assert len(set(addresses)) == 3


@pytest.mark.parametrize(
    ("host", "pattern"),
    [("127.0.0.2", r"127\.0\.0\.2:\d+"), ("::1", r"\[::1\]:\d+")],
)
def test_host_is_the_address_in_the_cluster(launch, write, host, pattern):
    try:
        with socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET
        ) as probe:
            probe.bind((host, 0))
    except OSError as error:
        pytest.skip(f"{host} is no address here: {error}")
    script = write(INDEX, "print(*cluster['cluster']['worker'])")
    run = launch("--workers", "1", "--host", host, script)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(pattern, lines_of(run.stdout, 0)[0].decode())


SURROUNDINGS = """
import json, os, sys, __main__
loaded = "tensorflow" in sys.modules
fallen = {key: os.environ[key] for key in sorted(os.environ)}
fallen.pop("TF_CONFIG", None)
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__,
    "doc": __doc__, "package": __package__, "spec": __spec__ and __spec__.name,
    "loader": type(__loader__).__name__,
    "main": vars(__main__) is globals(), "environment": fallen,
    "folder": os.getcwd(), "stdin": sys.stdin.read(),
    "code": sys._getframe().f_code.co_filename,
    "files": sorted(os.listdir("/proc/self/fd")),
}))
print(len(sys.modules["tensorflow"].config.cpus) if loaded else "no TensorFlow")
"""
ARGUMENTS = ["-m", "x", "--workers", "5", "--", "-h", "", "a b", "--host=é"]


SCRIPT, LINK = ["inner/script.py"], ["link.py"]
PACKAGE_MAIN, SUBMODULE = ["-m", "inner"], ["-m", "inner.script"]


@pytest.mark.usefixtures("fake_tensorflow")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("safe_path", ["", "1"])
@pytest.mark.parametrize(
    "command", [SCRIPT, LINK, PACKAGE_MAIN, SUBMODULE], ids=" ".join
)
def test_script_sees_what_plain_python_shows(
    launch, write, environment, tmp_path, devices, command, safe_path
):
    script = write(SURROUNDINGS, name="inner/script.py")
    write("'''Documented.'''", SURROUNDINGS, name="inner/__main__.py")
    write("", name="inner/__init__.py")
    (tmp_path / "link.py").symlink_to(script)
    if safe_path:
        environment.setenv("PYTHONSAFEPATH", "1")
        environment.setenv(
            "PYTHONPATH", f"{os.environ['PYTHONPATH']}:{tmp_path}"
        )
    plain = subprocess.run(
        [sys.executable, *command, *ARGUMENTS],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=LIMIT,
    )
    run = launch(
        *["--workers", "1", "--devices-per-worker", str(devices)],
        *[*command, *ARGUMENTS],
    )
    assert run.returncode == 0, run.stderr
    seen, state = lines_of(run.stdout, 0)
    expected, _ = plain.stdout.splitlines()
    seen, expected = json.loads(seen), json.loads(expected)
    assert seen == expected
    assert state == (b"no TensorFlow" if devices == 1 else b"2")


def test_launcher_does_without_tensorflow(launch, write, environment, tmp_path):
    for name in ("tensorflow", "keras", "numpy"):
        write("raise ImportError(__name__)", name=f"missing/{name}.py")
    environment.setenv(
        "PYTHONPATH", f"{tmp_path / 'missing'}:{os.environ['PYTHONPATH']}"
    )
    run = launch("--workers", "1", write("print('ran')"))
    assert run.returncode == 0, run.stderr
    assert lines_of(run.stdout, 0) == [b"ran"]


def test_command_takes_all_that_follows_it():
    own, command = split(
        ["--workers", "2", "--host=h", "--", "a.py", "--", "b"]
    )
    assert own == ["--workers", "2", "--host=h"]
    assert command == ["a.py", "--", "b"]
    assert split(["-m", "m", "--help"]) == ([], ["-m", "m", "--help"])
    assert split(["--workers", "-1", "a.py"]) == (
        ["--workers", "-1"],
        ["a.py"],
    )


@pytest.mark.usefixtures("fake_tensorflow")
@pytest.mark.parametrize("command", [SCRIPT, SUBMODULE], ids=" ".join)
def test_failure_with_devices_is_that_of_the_script(launch, write, command):
    write("raise ValueError('no data')", name="inner/script.py")
    run = launch("--workers", "1", "--devices-per-worker", "2", *command)
    assert run.returncode == 1
    assert lines_of(run.stderr, 0)[-1] == b"ValueError: no data"


@pytest.mark.usefixtures("fake_tensorflow")
def test_script_with_devices_keeps_main_for_threads_and_exit(launch, write):
    script = write(
        "import atexit, sys, threading\n"
        "def check(): print(sys.modules['__main__'].check is check)\n"
        "atexit.register(check)\n"
        "threading.Timer(1, check).start()\n"
    )
    run = launch("--workers", "1", "--devices-per-worker", "2", script)
    assert run.returncode == 0, run.stderr
    assert lines_of(run.stdout, 0) == [b"True", b"True"]


def test_port_is_reserved_for_tensorflow_alone(launch, write):
    script = write(
        INDEX,
        "import socket\n"
        "_, port = cluster['cluster']['worker'][index].split(':')\n"
        "taker = socket.socket()\n"
        "try:\n"
        "    taker.bind(('', int(port)))\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
        "taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)\n"
        "taker.bind(('', int(port)))\n"
        "taker.listen()\n"
        "with socket.create_connection(('127.0.0.1', int(port))):\n"
        "    print(taker.accept()[1][0])\n",
    )
    run = launch("--workers", "2", script)
    assert run.returncode == 0, run.stderr
    for index in range(2):
        assert lines_of(run.stdout, index) == [
            b"Address already in use",
            b"127.0.0.1",
        ]


def test_worker_leads_a_session(launch, write):
    script = write("import os; print(os.getsid(0) == os.getpid())")
    assert lines_of(launch("--workers", "1", script).stdout, 0) == [b"True"]


def test_launchers_at_once_share_no_port(start, write):
    script = write(
        INDEX, "print('ready', *[n.split(':')[1] for n in cluster['cluster']",
        "['worker']], flush=True)", f"\ntime.sleep({LONG})",
    )  # fmt: skip
    launchers = [start("--workers", "4", script) for _ in range(3)]
    ports = [set(launcher.pids(4)) for launcher in launchers]
    assert all(len(each) == 4 for each in ports)
    assert len(set.union(*ports)) == 12


# What workers say.


def test_output_has_prefixes_and_keeps_streams_apart(launch, write):
    script = write(
        INDEX,
        "print('out', index)\n"
        "print('err', index, file=sys.stderr)\n"
        "print()\n"
        "print('last', end='')\n",
    )
    run = launch("--workers", "2", script)
    assert run.returncode == 0
    for index in range(2):
        out = [b"out %d" % index, b"", b"last"]
        assert lines_of(run.stdout, index) == out
        assert lines_of(run.stderr, index) == [b"err %d" % index]
    assert run.stdout.count(b"\n") == 6 and run.stderr.count(b"\n") == 2


def test_output_appears_before_the_worker_ends(start, write):
    script = write(
        INDEX, "print('ready', os.getpid())\n", f"time.sleep({LONG})"
    )
    [pid] = start("--workers", "1", script).pids(1)
    assert is_alive(pid)


def test_output_of_any_kind_stays_whole(launch, write):
    script = write(
        INDEX,
        "mark = b'%d' % index\n"
        "for stream in (sys.stdout.buffer, sys.stderr.buffer):\n"
        "    stream.write(mark * 3_000_000 + b'\\n')\n"
        "    stream.write(b'\\xff\\xfe\\x00' + mark + b'\\n')\n"
        "    for _ in range(300):\n"
        "        stream.write(mark * 100 + b'\\n')\n"
        "        stream.flush()\n"
        "    stream.write(mark * 100_000)\n",
    )
    run = launch("--workers", "3", script)
    assert run.returncode == 0
    for index in range(3):
        mark = b"%d" % index
        expected = [mark * 3_000_000, b"\xff\xfe\x00" + mark]
        expected += [mark * 100] * 300 + [mark * 100_000]
        assert lines_of(run.stdout, index) == expected
        assert lines_of(run.stderr, index) == expected
    assert run.stdout.count(b"\n") == run.stderr.count(b"\n") == 3 * 303


def test_lines_stay_whole_where_both_streams_meet(launch, write):
    script = write(
        INDEX,
        "import threading\n"
        "def say(stream, mark):\n"
        "    for _ in range(50):\n"
        "        stream.write(mark * 200_000 + '\\n')\n"
        "error = threading.Thread(target=say, args=(sys.stderr, 'e'))\n"
        "error.start()\n"
        "say(sys.stdout, 'o')\n",
    )
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    run = launch("--workers", "1", script, capture_output=False, **options)
    assert run.returncode == 0
    lines = sorted(lines_of(run.stdout, 0))
    assert lines == [b"e" * 200_000] * 50 + [b"o" * 200_000] * 50


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"1%\r2%\r3%\n", [b"1%", b"2%", b"3%"]),
        (b"\r1%\r2%\r\n\n", [b"1%", b"2%", b""]),
        (b"a\r\nb\r\n\r\nc", [b"a", b"b", b"", b"c"]),
        (b"\na\n\nb\r", [b"", b"a", b"", b"b"]),
        (b"\x0b\x0c\x85\x1c\xe2\x80\xa8", [b"\x0b\x0c\x85\x1c\xe2\x80\xa8"]),
        (b"", []),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_do_not_depend_on_chunks(text, lines, size):
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    assert list(whole_lines(chunks)) == lines


def test_progress_bar_appears_state_by_state(start, write, tmp_path):
    script = write(
        INDEX,
        "print('\\rready', os.getpid(), end='\\r')\n",
        f"time.sleep({LONG})",
    )
    [pid] = start("--workers", "1", script).pids(1)
    assert is_alive(pid)


def test_slow_reader_loses_nothing(start, write):
    script = write(INDEX, "for n in range(40_000): print('line', n)\n")
    launcher = start("--workers", "2", script)
    time.sleep(1)  # Until the pipe is full.
    output = launcher.process.stdout.read()
    assert launcher.wait() == 0
    for index in range(2):
        expected = [b"line %d" % number for number in range(40_000)]
        assert lines_of(output, index) == expected


def test_non_blocking_stdout_loses_nothing(start, write):
    script = write("for n in range(40_000): print('line', n)\n")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    launcher = start("--workers", "1", script, stdout=writer)
    os.close(writer)
    time.sleep(1)
    with open(reader, "rb") as stream:
        output = stream.read()
    assert launcher.wait() == 0, launcher.errors()
    assert len(lines_of(output, 0)) == 40_000


@pytest.mark.parametrize("full", [True, False], ids=["full", "closed"])
def test_output_that_cannot_be_written_ends_all(start, write, full):
    script = write(INDEX, "while True: print('line')")
    with open("/dev/full", "wb") as device:
        options = {"stdout": device} if full else {}
        launcher = start("--workers", "2", script, **options)
    if not full:
        launcher.process.stdout.readline()
        pids = launcher.children()
        launcher.process.stdout.close()
    assert launcher.wait() == 1
    reason = "No space left on device" if full else "Broken pipe"
    if full:
        assert reason in launcher.errors()
    else:
        assert_gone(pids)


@pytest.mark.parametrize(
    "closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"]
)
def test_closed_streams_take_nothing(launch, write, tmp_path, closed):
    script = write(
        INDEX,
        "print('out')\n"
        "print('err', file=sys.stderr)\n"
        "open('ran', 'w').close()\n"
        "sys.exit(3)\n",
    )
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *LAUNCHER]
    run = launch("--workers", "1", script, command=command)
    assert run.returncode == 3, run.stderr
    assert (tmp_path / "ran").exists()
    is_closed = [">&-" in closed.split(), "2>&-" in closed]
    assert lines_of(run.stdout, 0) == ([] if is_closed[0] else [b"out"])
    assert lines_of(run.stderr, 0) == ([] if is_closed[1] else [b"err"])
    refused = launch("--workers", "0", script, command=command)
    assert refused.returncode == 2, refused.stderr


def test_escaped_process_does_not_hold_the_launcher(start, write):
    script = write(
        INDEX,
        f"child = subprocess.Popen(['sleep', '{LONG}'],",
        " start_new_session=True)\nprint('ready', child.pid)\n",
    )
    launcher = start("--workers", "1", script)
    [pid] = launcher.pids(1)
    try:
        assert launcher.wait() == 0
        assert is_alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


# How workers end.

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
    # Worker 2 has ended well before worker 1 fails.
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
    "restart = int(os.environ['TF_OPTIMIZERS_RESTART'])\n"
    "print(restart, *cluster['cluster']['worker'], flush=True)\n"
    "if index == 1 and restart < 2: os.kill(os.getpid(), signal.SIGKILL)\n"
    f"if restart < 2: time.sleep({LONG})\n",
)


def test_failed_worker_is_started_anew_with_all_others(launch, write):
    script = write(*RESTARTING)
    run = launch(
        *("--workers", "2", "--max-restarts", "2"),
        *("--restart-pause", "0.1", script),
    )
    assert run.returncode == 0
    lines = [line.split() for line in lines_of(run.stdout, 1)]
    assert [line[0] for line in lines] == [b"0", b"1", b"2"]
    assert [line.split() for line in lines_of(run.stdout, 0)][-1] == lines[-1]
    killed = (
        "[launcher] Worker 1 was killed by signal 9 (Killed). "
        "All workers are stopped."
    )
    assert run.stderr.decode().splitlines() == [
        killed,
        "[launcher] Restart 1 of 2 in 0.1 s.",
        killed,
        "[launcher] Restart 2 of 2 in 0.2 s.",
    ]


def test_exit_code_after_all_restarts_is_that_of_the_last_start(launch, write):
    script = write(
        INDEX,
        "restart = int(os.environ['TF_OPTIMIZERS_RESTART'])\n"
        "sys.exit(3 + restart)\n",
    )
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


def test_signal_ends_the_launcher_despite_restarts(start, write):
    script = write(
        f"import time; print('ready', 0, flush=True)\ntime.sleep({LONG})"
    )
    launcher = start("--workers", "1", "--max-restarts", "5", script)
    launcher.process.stdout.readline()
    launcher.process.terminate()
    assert launcher.wait() == 143
    assert "Restart" not in launcher.errors()


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


def test_exit_code_255_is_not_a_signal(launch, write):
    run = launch("--workers", "1", write("import os; os._exit(255)"))
    assert run.returncode == 255


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


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM])
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


@pytest.mark.usefixtures("without_watchdog")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_kills_all_at_once(start, write, tmp_path, number):
    script = write(INDEX, STUBBORN, f"time.sleep({LONG})")
    launcher = start("--workers", "2", "--grace-period", str(LONG), script)
    launcher.pids(2)
    launcher.process.send_signal(number)
    launcher.wait_to_hear(f"Received {number.name}. All workers are stopped.")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 128 + number
    assert not processes_with(str(tmp_path))
    assert "Received SIGINT again. Workers are killed." in launcher.errors()


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
    time.sleep(0.3)  # In which it would kill.
    (tmp_path / "end").touch()
    assert launcher.process.stdout.readline() == b"[worker 0] cleaned\n"
    assert launcher.wait() == 129


@pytest.mark.parametrize("code", [0, 4])
def test_children_of_a_worker_end_with_it(start, write, code):
    script = write(
        INDEX,
        f"child = subprocess.Popen(['sleep', '{LONG}'])\n"
        "print('ready', child.pid, flush=True)\n"
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
        # Whoever runs the tests may have been started by `nohup`.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    pids = launcher.pids(2) + launcher.children()
    assert len(set(pids)) == 5  # The watchdog as well.
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


def test_killed_launcher_leaves_nobody(start, write):
    launcher = start(
        "--workers", "2", write(INDEX, STUBBORN, f"time.sleep({LONG})")
    )
    pids = launcher.pids(2)
    pids += launcher.children()
    assert len(set(pids)) == 5
    launcher.process.kill()
    assert_gone(pids)


def test_launcher_killed_while_it_starts_leaves_nobody(start, write, tmp_path):
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


def processes_with(text):
    """Return the processes that have `text` in command line or folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            known = (folder / "cmdline").read_bytes().decode(errors="replace")
            known += os.readlink(folder / "cwd")
        except OSError:
            continue  # It has ended, or is none of ours.
        if text in known and is_alive(int(folder.name)):
            found.append(known)
    return found


def test_output_that_nobody_reads_does_not_keep_workers(start, write):
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
    time.sleep(0.5)  # Until the pipes are full.
    launcher.process.send_signal(signal.SIGTERM)
    assert_gone(pids[1:])
    # What it says on stderr does not wait for those who read stdout.
    launcher.wait_to_hear("Received SIGTERM. All workers are stopped.")
    # The output that is left keeps the launcher, until it is told again.
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait() == 143


# On a busy machine the watchdog comes too late; here it never comes.
WITHOUT_WATCHDOG = """
import subprocess
class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        is_watchdog = command[-1] == "watch"
        super().__init__(["cat"] if is_watchdog else command, **options)
subprocess.Popen = Popen
"""


@pytest.fixture
def without_watchdog(environment, write):
    folder = Path(write(WITHOUT_WATCHDOG, name="site/sitecustomize.py")).parent
    environment.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.mark.usefixtures("without_watchdog")
def test_workers_that_cannot_be_started_leave_nobody(launch, write, tmp_path):
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


# Bad input.

COUNT = "must be an integer of at least 1. Received: {}."
SECONDS = "must be a finite number of seconds >= 0. Received: {}."
HOST = "must be an address of this machine. Received: {}"
FILE = "the script must be a file. Received: {}"
MODULE = "the module must be one that `python -m` can run from this folder. "
NOTHING = "a script or `-m module` must follow the options. Received: {}."
BAD = {
    "": "required: --workers",
    "good.py": "required: --workers",
    "--workers": "expected one argument",
    "--workers 2": NOTHING.format("neither"),
    "--workers 2 --": NOTHING.format("neither"),
    "--workers 2 -m": NOTHING.format("-m"),
    "--workers 0 good.py": COUNT.format(0),
    "--workers -1 good.py": COUNT.format(-1),
    "--workers 2.0 good.py": COUNT.format("2.0"),
    "--workers good.py": COUNT.format("good.py"),
    "--workers= good.py": COUNT.format(""),
    "--workers 2 --devices-per-worker 0 good.py": COUNT.format(0),
    "--workers 2 --devices-per-worker x good.py": COUNT.format("x"),
    "--workers 2 --grace-period -1 good.py": SECONDS.format(-1),
    "--workers 2 --grace-period nan good.py": SECONDS.format("nan"),
    "--workers 2 --grace-period inf good.py": SECONDS.format("inf"),
    "--workers 2 --grace-period soon good.py": SECONDS.format("soon"),
    "--workers 2 --host 192.0.2.1 good.py": HOST.format("192.0.2.1"),
    "--workers 2 --host a..b good.py": HOST.format("a..b"),
    "--workers 2 missing.py": FILE.format("missing.py, which does not exist"),
    "--workers 2 package": FILE.format("package, which is a folder"),
    "--workers 2 -m missing": MODULE + "Received: -m missing.",
    "--workers 2 -m package.missing": MODULE + "Received: -m package.missing.",
    "--workers 2 -m package": MODULE + "Received: -m package.",
    "--workers 2 -m good.py": MODULE + "Received: -m good.py.",
    "--workers 2 -m .good": MODULE + "Received: -m .good.",
    "--workers 2 -m good..x": MODULE + "Received: -m good..x.",
    "--workers 2 --work 3 good.py": "unrecognized arguments: --work 3",
    "--workers 2 --max-restarts -1 good.py": COUNT.replace("1.", "0.").format(
        -1
    ),
    "--workers 2 --max-restarts x good.py": COUNT.replace("1.", "0.").format(
        "x"
    ),
    "--workers 2 --restart-pause -1 good.py": SECONDS.format(-1),
    "--workers 2 --unknown x good.py": "unrecognized arguments: --unknown x",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_refused_before_anything_starts(launch, write, line):
    good = write("open('started', 'w')", name="good.py")
    write("open('started', 'w')", name="package/__init__.py")
    run = launch(*line.split(" ")) if line else launch()
    assert run.returncode == 2
    message = " ".join(run.stderr.decode().split())
    assert " ".join(BAD[line].split()) in message
    assert "Traceback" not in message and not run.stdout
    assert not Path(good).with_name("started").exists()


def test_package_and_module_that_can_run_are_not_refused(launch, write):
    write("raise ImportError('Only where it runs.')", name="bad/__init__.py")
    write("", name="bad/__main__.py")
    write("print('main')", name="good/__main__.py")
    assert b"ImportError" in launch("--workers", "1", "-m", "bad").stderr
    run = launch("--workers", "1", "-m", "good")
    assert lines_of(run.stdout, 0) == [b"main"]


def test_cluster_that_exists_is_not_overridden(launch, write, environment):
    environment.setenv("TF_CONFIG", '{"cluster": {}}')
    good = write("open('started', 'w')")
    run = launch("--workers", "2", good)
    assert run.returncode == 2
    message = run.stderr.decode()
    assert "`TF_CONFIG` must not be set" in message
    assert "Received: TF_CONFIG='{\"cluster\": {}}'. Unset it" in message
    assert not Path(good).with_name("started").exists()


def test_help_tells_every_option_and_its_default(launch):
    run = launch("--help")
    assert run.returncode == 0
    text = " ".join(run.stdout.decode().split())
    for option in ("--workers N", "M", "127.0.0.1", "(10)", "(1)", "(0)"):
        assert option in text


# With TensorFlow.


def test_workers_form_a_strategy_and_reduce(launch, write):
    script = write(
        INDEX,
        "import tensorflow as tf\n"
        "strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
        "@tf.function\n"
        "def total():\n"
        "    value = tf.constant([1.0, 10.0]) * (index + 1)\n"
        "    context = tf.distribute.get_replica_context()\n"
        "    return context.all_reduce('sum', value)\n"
        "result = strategy.run(total).numpy().tolist()\n"
        "print('workers', strategy.num_replicas_in_sync, result)\n",
    )
    run = launch("--workers", "2", script)
    assert run.returncode == 0, run.stderr.decode(errors="replace")
    for index in range(2):
        assert b"workers 2 [3.0, 30.0]" in lines_of(run.stdout, index)


def test_devices_per_worker_are_logical_cpus(launch, write):
    script = write(
        "import tensorflow as tf\n"
        "print(*(cpu.name for cpu in tf.config.list_logical_devices('CPU')))",
    )
    arguments = ["--workers", "2", "--devices-per-worker", "2", script]
    run = launch(*arguments)
    assert run.returncode == 0, run.stderr.decode(errors="replace")
    for index in range(2):
        expected = b"/device:CPU:0 /device:CPU:1"
        assert lines_of(run.stdout, index)[-1] == expected


def test_port_taken_by_force_is_an_error_of_that_worker(launch, write):
    script = write(
        INDEX,
        "import socket, tensorflow as tf\n"
        "port = cluster['cluster']['worker'][index].split(':')[1]\n"
        "if index:\n"
        "    taker = socket.socket()\n"
        "    taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "    taker.bind(('', int(port)))\n"
        "    taker.listen()\n"
        "    print(port, flush=True)\n"
        "tf.distribute.MultiWorkerMirroredStrategy()\n",
    )
    run = launch("--workers", "2", "--grace-period", "0", script)
    assert run.returncode == 1
    assert b"[launcher] Worker 1 failed with exit code 1." in run.stderr
    errors = b"\n".join(lines_of(run.stderr, 1))
    assert b"Could not start gRPC server" in errors
    assert b"0.0.0.0:" + lines_of(run.stdout, 1)[0] in errors
