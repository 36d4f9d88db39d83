"""A few of the faults in tests/faults, which tries all, repeatedly."""

import json
import pathlib
import subprocess
import types

import pytest
from faults import soak, table, training

# Cases and their steps. test_resume.py kills workers during training;
# test_backup.py tests damaged backups and NaN in one process.
CASES = {
    "chief killed as it writes its part": 31,
    "network down permanently": 58,
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the weights of an undisturbed training."""
    return training.reference(tmp_path_factory.mktemp("reference"))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_fault_ends_as_it_should(case, expected):
    if reason := soak.missing(case):
        pytest.skip(reason)
    trial = soak.attempt(case, CASES[case], expected)
    assert trial["passed"], trial


@pytest.mark.long
def test_distributed_state_survives_a_kill_during_saving(tmp_path):
    """No other worker's file holds the part of the killed worker."""
    own = {"optimizer": "ShardedState"}
    expected = training.reference(tmp_path, **own)
    case = "other worker killed as it writes its part"
    trial = soak.attempt(case, 31, expected, **own)
    assert trial["passed"], trial


@pytest.mark.parametrize("figure", ["detected", "resumed", "steps_lost"])
def test_table_holds_medians_and_ranges(figure):
    trials = [
        {"case": "a", "passed": True, "weights_equal": True, figure: value}
        for value in (1.5, 4, 2)
    ]
    assert "| 2 (1.5-4) |" in table.make(trials)
    assert "| a | 3 | 3 |" in table.make(trials)


def test_batches_that_a_backup_has_seen_are_no_training():
    first = {"pid": 1, "event": "step"}
    again = {"pid": 2, "event": "step"}
    events = [
        *({"time": t, "step": 20 + t} | first for t in (1, 2, 3)),
        {"time": 8, "step": 22} | again | {"event": "begin"},
        *({"time": t, "step": 22} | again for t in (9, 10)),
        {"time": 11, "step": 23} | again,
        {"time": 12, "step": 24} | again,
    ]
    run = types.SimpleNamespace(
        events=lambda place=0: events, noticed=lambda since: None
    )
    found = soak.measure(run, 3.5, None)
    assert found["resumed"] == 11 - 3.5
    assert found["steps_lost"] == 1


def test_trial_that_leaves_a_process_fails(monkeypatch, tmp_path):
    """Processes that pile up would take the memory of later trials."""
    left = []

    def leave(folder, **_):
        left.append(subprocess.Popen(["tail", "-f", "/dev/null"], cwd=folder))
        raise TimeoutError("no training")

    monkeypatch.setattr(soak.training, "Training", leave)
    check_gone = soak.check_gone
    monkeypatch.setattr(soak, "check_gone", lambda f: check_gone(f, 0.1))
    trial = soak.attempt("chief killed", 31, None)
    left[0].kill()
    left[0].wait()
    assert not trial["passed"]
    assert "Still running: ['tail" in trial["error"]


def test_table_in_docs_is_that_of_the_trials():
    root = pathlib.Path(__file__).parents[2]
    trials = json.loads((root / "tests/faults/results.json").read_text())
    text = (root / "docs" / "faults.md").read_text()
    assert f"<!-- faults -->\n\n{table.make(trials)}\n" in text
    assert {trial["case"] for trial in trials} == set(soak.CASES)
