"""Valid and invalid arguments of the launcher."""

from pathlib import Path

import pytest
from launcher import lines_of

from tf_optimizers.launch.__main__ import split


def test_command_takes_all_later_arguments():
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


COUNT = "must be an integer of at least 1. Received: {}."
SECONDS = "must be a finite number of seconds >= 0. Received: {}."
HOST = "must be an address of this machine. Received: {}"
FILE = "the script must be a file. Received: {}"
MODULE = "`python -m` must be able to run the module from this folder. "
NOTHING = "a script or `-m module` must follow the options. Received: {}."
START = "`--workers` or `--cluster` must be given. Received: neither."
BAD = {
    "": START,
    "good.py": START,
    "--cluster pbs good.py": "argument --cluster: invalid choice: 'pbs'",
    "--cluster auto good.py": "Received: none (tf-config: TF_CONFIG;",
    "--cluster auto --host h good.py": HOST.format("h"),
    "--cluster auto --host ::1 good.py": "`--host` must be left out",
    "--cluster auto --port 0 good.py": "must be an integer in [1, 65535].",
    "--workers 2 --port 5 good.py": "`--port` must come with `--cluster`.",
    "--workers 2 --machines 2 good.py": "`--machines` must come with",
    "--workers 2 --gpus-per-worker 1 good.py": "GPUs must be at least 2",
    "--workers 2 --gpus-per-worker -1 good.py": (
        "must be an integer of at least 0. Received: -1. Pass 0 for none."
    ),
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
    "--workers 2 -m __main__": MODULE + "Received: -m __main__.",
    "--workers 2 -m good..x": MODULE + "Received: -m good..x.",
    "--workers 2 --work 3 good.py": "unrecognized arguments: --work 3",
    "--workers 2 --max-restarts -1 good.py": COUNT.replace("1.", "0.").format(
        -1
    ),
    "--workers 2 --max-restarts x good.py": COUNT.replace("1.", "0.").format(
        "x"
    ),
    "--workers 2 --restart-pause -1 good.py": SECONDS.format(-1),
    "--workers 2 --standby 5 good.py": "`--standby` must come with",
    "--workers 2 --standby x good.py": SECONDS.format("x"),
    "--workers 2 --unknown x good.py": "unrecognized arguments: --unknown x",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_rejected_before_anything_starts(launch, write, line):
    good = write("open('started', 'w')", name="good.py")
    write("open('started', 'w')", name="package/__init__.py")
    run = launch(*line.split(" ")) if line else launch()
    assert run.returncode == 2
    message = " ".join(run.stderr.decode().split())
    assert " ".join(BAD[line].split()) in message
    assert "Traceback" not in message and not run.stdout
    assert not Path(good).with_name("started").exists()


def test_package_and_module_that_can_run_are_not_rejected(launch, write):
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


def test_help_shows_every_option_and_its_default(launch):
    run = launch("--help")
    assert run.returncode == 0
    text = " ".join(run.stdout.decode().split())
    defaults = "127.0.0.1", "(12345)", "(30, or 10 after", "(1)", "(0)"
    for option in ("--workers N", "--cluster", "M", *defaults):
        assert option in text
