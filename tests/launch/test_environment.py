"""The environment of a worker: its place, variables, files and port."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest
from launcher import (
    INDEX,
    LIMIT,
    LONG,
    lines_of,
)

from tf_optimizers.launch import group


def test_worker_gets_its_place_in_the_cluster(launch, write):
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
for name in ("TF_CONFIG", "no_grpc_proxy", "TF_NUM_INTRAOP_THREADS",
             "PYTHONHASHSEED"):
    fallen.pop(name, None)
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


def plain_lines(script, environment, tmp_path, command, safe_path):
    """Return the output of a command in plain Python, after setting it up."""
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
    return plain.stdout.splitlines()


@pytest.mark.usefixtures("fake_tensorflow")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("safe_path", ["", "1"])
@pytest.mark.parametrize(
    "command", [SCRIPT, LINK, PACKAGE_MAIN, SUBMODULE], ids=" ".join
)
def test_script_sees_the_environment_of_plain_python(
    launch, write, environment, tmp_path, devices, command, safe_path
):
    script = write(SURROUNDINGS, name="inner/script.py")
    write("'''Documented.'''", SURROUNDINGS, name="inner/__main__.py")
    write("", name="inner/__init__.py")
    plain = plain_lines(script, environment, tmp_path, command, safe_path)
    run = launch(
        *["--workers", "1", "--devices-per-worker", str(devices)],
        *[*command, *ARGUMENTS],
    )
    assert run.returncode == 0, run.stderr
    seen, state = lines_of(run.stdout, 0)
    expected, _ = plain
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


def test_port_is_reserved_for_tensorflow_only(launch, write):
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


def test_simultaneous_launchers_share_no_port(start, write):
    script = write(
        INDEX, "print('ready', *[n.split(':')[1] for n in cluster['cluster']",
        "['worker']], flush=True)", f"\ntime.sleep({LONG})",
    )  # fmt: skip
    launchers = [start("--workers", "4", script) for _ in range(3)]
    ports = [set(launcher.pids(4)) for launcher in launchers]
    assert all(len(each) == 4 for each in ports)
    assert len(set.union(*ports)) == 12


@pytest.mark.parametrize(
    ("given", "cores", "expected"),
    [(None, 7, "3"), (None, 1, "1"), ("5", 7, "5")],
)
def test_workers_share_the_cores(monkeypatch, given, cores, expected):
    monkeypatch.delenv(group.THREADS, raising=False)
    if given:
        monkeypatch.setenv(group.THREADS, given)
    monkeypatch.setattr(group, "cores", lambda: cores)
    found = group.environment(["127.0.0.1:1", "127.0.0.1:2"], 0, 2)
    assert found[group.THREADS] == expected


@pytest.mark.parametrize("given", [None, "5", "random"])
def test_sets_have_one_order_on_all_workers(launch, write, environment, given):
    environment.delenv("PYTHONHASHSEED", raising=False)
    if given:
        environment.setenv("PYTHONHASHSEED", given)
    texts = "[str(i) for i in range(50)]"
    script = write(
        f"import os; print(os.environ['PYTHONHASHSEED'], *set({texts}))"
    )
    run = launch("--workers", "2", script)
    first, second = (lines_of(run.stdout, index)[0] for index in range(2))
    assert (first == second) == (given != "random")
    assert first.split()[0].decode() == (given or "0")
