"""A signal to a forked process is not lost."""

import subprocess
import sys

import pytest

from tf_optimizers import forks

# A child is slow to start; another function restores the handler earlier.
SCRIPT = f"""
import os, runpy, signal, sys, time

def give_back():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

signal.signal(signal.SIGTERM, lambda *_: None)
if "blocked" in sys.argv:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
restore_in_forks = runpy.run_path({forks.__file__!r})["restore_in_forks"]
restore_in_forks(lambda: None)
os.register_at_fork(after_in_child=lambda: time.sleep(0.3))
restore_in_forks(give_back)
child = os.fork()
if child == 0:
    time.sleep(20 * ("blocked" not in sys.argv))
    os._exit(3)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(*signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


@pytest.mark.parametrize(
    ("arguments", "expected"), [((), "-15\n\n"), (("blocked",), "3\n15\n")]
)
def test_child_gets_a_signal_that_arrives_before_its_handler(
    arguments, expected
):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == expected
