"""The output of workers is complete, immediate and prefixed."""

import os
import signal
import subprocess
import time

import pytest
from launcher import INDEX, LONG, assert_gone, is_alive, lines_of
from real_workers import LAUNCHER

from tf_optimizers.launch.output import whole_lines


def test_output_has_prefixes_and_separate_streams(launch, write):
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


@pytest.mark.usefixtures("fake_tensorflow")
@pytest.mark.parametrize("devices", ["1", "2"])
def test_output_appears_before_the_worker_ends(start, write, devices):
    script = write(
        INDEX, "print('ready', os.getpid())\n", f"time.sleep({LONG})"
    )
    options = ("--workers", "1", "--devices-per-worker", devices)
    [pid] = start(*options, script).pids(1)
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


def test_lines_stay_whole_if_streams_are_joined(launch, write):
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
