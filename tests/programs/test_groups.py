"""Groups of processes end, and report how they ended."""

import os
import threading
import time

import pytest

from . import groups

_WORKER = """import pathlib, subprocess, sys, time

folder = pathlib.Path(sys.argv[1])
while not (folder / "0.json").exists():
    time.sleep(0.01)
exec((folder / "0.py").read_text())
"""


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "WORKER", tmp_path / "worker.py")
    groups.WORKER.write_text(_WORKER)
    return groups.Group("1")


def test_last_words_are_of_the_last_processes(group):
    for text in ("first", "second"):
        assert group.run(f"sys.exit({text!r})", limit=60) == [None]
        assert group.last_words() == f"exit code 1\n{text}"


def test_program_has_no_result_if_another_thread_closes_its_group(group):
    closing = threading.Timer(1, group.close)
    closing.start()
    assert group.run("time.sleep(30)", limit=60) == [None]
    closing.join()


def test_processes_that_a_program_started_end_with_the_group(group, tmp_path):
    """A pool may not have been closed."""
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    script = f"""output = open({str(held)!r}, "wb")
subprocess.Popen(["sleep", "20"], stdout=output)
output.write(b"started")
output.close()"""
    group.run(script, limit=60)
    started = time.monotonic()
    os.set_blocking(reader, True)
    with open(reader, "rb") as written:
        # It ends when no process can write to it.
        assert written.read() == b"started"
    assert time.monotonic() - started < 10
