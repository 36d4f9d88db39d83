"""Worker processes that cannot continue raise an error in time."""

import contextlib
import json
import re
import signal
import subprocess
import sys

import pytest
import real_workers
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.launch.group import environment, reserve_addresses

pytestmark = pytest.mark.slow

PROGRAM = real_workers.SCRIPTS / "faults.py"


# Python errors, so that workers survive for the next case, except the last.
SURVIVED = {
    "settings": ["momentum=0.9 on worker 0", "momentum=0.8 on worker 1"],
    "step": ["step=0 on worker 0, step=7 on worker 1"],
    # As if only one worker had found a checkpoint.
    "sharded, step": ["step=0 on worker 0, step=7 on worker 1"],
    "sharded, weights": ["on the optimizer's first step", "dense/kernel=['"],
    "loop, weights": ["on the optimizer's first step", "kernel=['"],
    "sharded, counts alone": ["step=8 on worker 0, step=4 on worker 1"],
    "parted": ["All workers must agree on the weights", "dense/kernel=['"],
    "resets alone": ["Received: assignments=", "reset them on every worker"],
    "absent": ["Received nothing from worker 1 within 5 s"],
    "other rows": ["Received: batches that differ between workers"],
}
SURVIVED["other rows, overlap"] = SURVIVED["other rows"]
FAILED = [
    "a step that has failed on worker 1",
    "All workers must end a step before they begin the next step",
]
# Meanwhile, the other worker waits for the entries of a round. If Keras draws
# batches outside of steps, all later collectives fail.
EARLY = ["Received: the end of the data on some workers only"]
LAST = {"ends early, overlap": EARLY}


@pytest.fixture(scope="module")
def survivors(tmp_path_factory):
    """Run two workers through one error after another."""
    folder = tmp_path_factory.mktemp("faults")
    return real_workers.run("faults", folder, 2, *SURVIVED, *LAST, timeout=240)


@pytest.mark.parametrize("case", SURVIVED)
def test_fault_is_an_error_on_every_worker(survivors, case):
    assert None not in survivors.results, survivors.output[-5000:]
    for result in survivors.results:
        for message in SURVIVED[case]:
            assert message in result[case]


def test_differing_rates_are_a_separate_error(survivors):
    for worker in range(2):
        assert (
            f"[worker {worker}] rate: All workers must agree on the weights "
            "and the learning rate"
        ) in survivors.output
    expected = (
        "learning_rate='0.1' on worker 0, learning_rate='0.2' on worker 1"
    )
    assert expected in survivors.output


def assert_ended(outcome, messages):
    assert outcome.exit_code != 0
    assert "trained to the end" not in outcome.output
    for message in messages:
        assert message in outcome.output


def test_last_fault_ends_the_workers(survivors):
    (messages,) = LAST.values()
    assert_ended(survivors, messages)


def test_models_that_differ_are_an_error(tmp_path):
    outcome = real_workers.run("faults", tmp_path, 2, "model", timeout=120)
    assert_ended(outcome, ["Shape mismatch", "task:1", "[8,9]", "[8,8]"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("devices", ["devices=1 on worker 0, devices=2 on worker 1"]),
        *(
            (f"ends early{how}", EARLY)
            for how in (
                *("", ", several a call", ", mask", ", mask, overlap"),
                *(", array", ", eagerly"),
            )
        ),
        *(
            (f"ends early, read{how}", ["worker 1 (waiting in another"])
            for how in ("", ", overlap")
        ),
        *(
            (f"ends early, synchronize{how}", ["in the same order"])
            for how in ("", ", overlap")
        ),
        ("silent", ["Collective", "which has timed out on worker 0"]),
        ("failing", FAILED),
        ("drawing", FAILED),
        ("killed", ["Worker 1 was killed by signal 9"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fault_is_described_in_the_error(tmp_path, case, messages):
    outcome = real_workers.run("faults", tmp_path, 2, case, timeout=120)
    assert_ended(outcome, messages)


def test_strategy_created_too_late_is_rejected(monkeypatch):
    tf.constant(1.0)
    cluster = {"worker": ["a:1", "b:2"]}
    task = {"type": "worker", "index": 0}
    config = json.dumps({"cluster": cluster, "task": task})
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(RuntimeError, match="must be created before any tensor"):
        tfo.SparseMultiWorkerMirroredStrategy()


def run_without_launcher(folder, case):
    """Return the exit codes and the outputs of two workers."""
    with contextlib.ExitStack() as stack:
        addresses = reserve_addresses("127.0.0.1", 2, stack)
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, PROGRAM, case],
                    env=environment(addresses, place, 2)
                    | real_workers.environment(folder),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            for place in range(2)
        ]
        for process in processes:
            stack.callback(process.kill)
        outputs = [p.communicate(timeout=120)[0] for p in processes]
    return [process.returncode for process in processes], outputs


@pytest.mark.long
def test_saving_on_one_worker_is_an_error(tmp_path):
    """The other worker has continued; it ends too, without a launcher."""
    codes, outputs = run_without_launcher(tmp_path, "saves alone")
    assert all(codes), outputs
    for way in ("save", "save_weights", "checkpoint"):
        error = (
            r"All workers must read `\S+` together\. "
            "Received nothing from worker 1 within 2 s"
        )
        assert re.search(f"^{way}: {error}", outputs[0], re.M), outputs
    assert "nothing could be saved" in outputs[0]
    assert "trained to the end" not in outputs[1]


@pytest.mark.long
def test_worker_that_dies_before_its_entries_leave_is_an_error(tmp_path):
    """Between the ends of rounds, the other worker does not wait for it."""
    codes, outputs = run_without_launcher(tmp_path, "killed, overlap")
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, -signal.SIGKILL), outputs[0]
    assert "trained to the end" not in outputs[0]
