"""The demo's gradient compression: its workers, its report."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict

import numpy as np
import pytest

from tf_optimizers.demo.__main__ import main
from tf_optimizers.demo.gradient_compression import report, study
from tf_optimizers.demo.gradient_compression.study import (
    FULL,
    PAIRS,
    QUICK,
    Plan,
    make_optimizers,
    optimizer_row,
)
from tf_optimizers.demo.processes import WorkersError, follow, run_workers
from tf_optimizers.demo.sockets import sent_bytes


class Progress:
    """Takes the place of the progress bar, and notes what it shows."""

    def __init__(self):
        self.shown = []
        self.count = 0

    def set_description_str(self, text):
        self.shown.append(text)

    def update(self):
        self.count += 1


def test_progress_follows_the_first_worker_only():
    progress = Progress()
    lines = [
        "[worker 0] begin run: SGD, seed 0\n",
        "[worker 1] begin run: another\n",
        "[worker 0] a warning\n",
        "[worker 0] end run: SGD, seed 0\n",
    ]
    assert list(follow(lines, progress)) == [lines[1], lines[2]]
    assert progress.shown == ["SGD, seed 0"] and progress.count == 1


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that workers can be started with."""

    def write(code):
        (tmp_path / "stub_worker.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        return ["stub_worker"]

    return write


def test_failing_worker_is_shown(module):
    command = module("raise SystemExit('this worker has no data')")
    with pytest.raises(WorkersError) as failure:
        run_workers(command, 2, 60, Progress())
    message = str(failure.value)
    assert message.startswith(
        "The 2 workers of the demo must end without an error. Received: exit "
        "code 1. See the end of their output:\n"
    )
    assert re.search(r"^\[worker \d\] this worker has no data$", message, re.M)


def test_overdue_workers_are_ended(module, tmp_path):
    command = module(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.pid').touch()\n"
        "print('waiting', flush=True)\n"
        "time.sleep(600)\n"
    )
    start = time.monotonic()
    with pytest.raises(WorkersError) as failure:
        run_workers(command, 2, 8, Progress())
    assert time.monotonic() - start < 60
    message = str(failure.value)
    assert "must end within 8 s. Received: they still ran." in message
    assert "waiting" in message
    started = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(started) == 2
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_failing_workers_fail_the_demo(module, monkeypatch, tmp_path, capfd):
    (command,) = module("raise SystemExit('this worker has no data')")
    monkeypatch.setattr(study, "WORKER", command)
    arguments = ["--parts", "gradient-compression", "--quick"]
    folder = tmp_path / "report"
    assert main([*arguments, "--report-dir", str(folder)]) == 1
    assert "this worker has no data" in capfd.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("plan", [FULL, QUICK], ids=["full", "quick"])
def test_plan_keeps_its_promises(plan):
    assert min(plan.tuning_seeds) > 1000  # test seeds count from 0
    for rates in plan.rates.values():
        assert list(rates) == sorted(rates)
    assert plan.batch_size % plan.workers == 0
    assert 1024 % plan.batch_size == 0
    optimizers = make_optimizers(plan)
    assert set(optimizers) == {*PAIRS, *PAIRS.values()}
    dgc, loco = (
        [schedule.stages[schedule.stage(step)] for step in range(plan.steps)]
        for schedule in (
            optimizers[name](0.1)._compressor.schedule
            for name in PAIRS.values()
        )
    )
    assert (
        dgc
        == loco
        == [
            plan.schedule.stages[plan.schedule.stage(step)]
            for step in range(plan.steps)
        ]
    )
    assert dgc[0] == 0.75 and dgc[-1] == 0.0
    # Enough epochs of the highest sparsity for the median.
    by_epoch = np.reshape(dgc, [plan.epochs, plan.steps_per_epoch])
    first, end = plan.steady_epochs
    highest = plan.schedule.sparsity[-1]
    assert (by_epoch[first:end] == highest).all() and end - first > 2
    others = [*by_epoch[:first], *by_epoch[end:]]
    assert all((epoch != highest).any() for epoch in others)


# A run per seed of six epochs, of which the first and the last are not steady.
PLAN = Plan(6, {"SGD": (0.1,)}, (10_001,), 2)


def made_up_run(name, seed, accuracy, byte_counts):
    return {
        "optimizer": name,
        "seed": seed,
        "loss": [2.0, 1.0, 0.5, 0.4, 0.3, 0.2 + seed],
        "bytes_per_step": byte_counts,
        "seconds_per_step": [9.0, 0.01, 0.02 + seed, 0.01, 0.02 + seed, 9.0],
        "test_accuracy": accuracy,
    }


def made_up_result(dense_bytes, sparse_bytes):
    """Return a result of two seeds, as `run` does."""
    runs = [
        made_up_run("SGD", 0, 0.95, dense_bytes),
        made_up_run("SGD", 1, 0.97, dense_bytes),
        made_up_run("tfo.DGCMomentum", 0, 0.96, sparse_bytes),
        made_up_run("tfo.DGCMomentum", 1, 0.94, sparse_bytes),
    ]
    names = ("SGD", "tfo.DGCMomentum")
    pair = {
        "optimizers": [optimizer_row(name, runs, PLAN) for name in names],
        "tuned": "SGD",
        "tuning": [],
        "learning_rate": 0.1,
        "at_edge_of_grid": True,
        "runs": runs,
        "communication": {
            "step": 47,
            "total": {"dense_bytes": 4000, "sent_bytes": 32, "ratio": 125.0},
        },
    }
    return {
        "settings": {
            **asdict(PLAN),
            "seeds": (0, 1),
            "steps_per_epoch": PLAN.steps_per_epoch,
            "steady_epochs": PLAN.steady_epochs,
            "warmup_share": 0.1,
            "sparsity": PLAN.schedule.sparsity,
            "momentum": 0.9,
            "split_sizes": {"train": 1024, "validation": 386, "test": 387},
        },
        "parameters": 12_345,
        "pairs": [pair],
    }


def test_summary_is_of_the_steady_epochs():
    dense = [9000, 5000, 5004, 5000, 5004, 9000]
    result = made_up_result(dense, [4000, 50, 54, 50, 54, 2000])
    sgd, dgc = result["pairs"][0]["optimizers"]
    assert sgd["mean"] == pytest.approx(0.96)
    assert sgd["std"] == pytest.approx(np.sqrt(2) * 0.01)
    assert sgd["bytes_per_step"] == 5002 and dgc["bytes_per_step"] == 52
    assert dgc["bytes_per_run"] == 8 * (4000 + 2000 + 208)
    assert dgc["final_loss"] == pytest.approx(0.7)
    assert dgc["seconds_per_step"] == pytest.approx(0.015)


def test_median_leaves_out_an_odd_epoch():
    counts = [1, 50, 50, 50, 50, 1]
    runs = [made_up_run("a", seed, 0.9, counts) for seed in range(2)]
    runs[1]["bytes_per_step"] = [1, 50, 50, 50, 10**9, 1]
    assert optimizer_row("a", runs, PLAN)["bytes_per_step"] == 50


def test_rows_are_computed_from_the_result():
    result = made_up_result([5000] * 6, [1900, *4 * [50], 2100])
    dense, sparse = result["pairs"][0]["optimizers"]
    dense["bytes_per_run"], sparse["bytes_per_run"] = 7.04e6, 1.0e6
    heading, dense, sparse, ratio = report.comparison_rows(result)
    assert {len(row) for row in (dense, sparse, ratio)} == {len(heading)}
    assert dense[:5] == ["SGD", "96.0 ± 1.4", "5,000", "4,000", "7.0"]
    assert sparse[:5] == ["tfo.DGCMomentum", "95.0 ± 1.4", "50", "32", "1.0"]
    assert ratio == ["ratio", "", "100", "125", "7", ""]


def test_findings_follow_the_numbers():
    result = made_up_result([5000] * 6, [1900, *4 * [50], 2100])
    accuracy, traffic, _ = report.findings(result)
    # Seed by seed +1 and -3: of the means alone, the spread would be lost.
    assert "-1.0 ± 2.8 percentage points" in accuracy
    assert "behind in 1 of 2 seeds" in accuracy
    assert "sends 100 times fewer" in traffic
    assert "18 are not entries" in traffic
    assert "A whole run sends 7 times fewer" in traffic


@pytest.mark.parametrize(
    "counts", [[None] * 6, [0] * 6], ids=["no counter", "counter stands still"]
)
def test_report_without_counted_bytes_says_so(counts, tmp_path):
    result = made_up_result(counts, counts)
    json.dumps(result, allow_nan=False)
    text = report.section(result, tmp_path)
    assert "| 96.0 ± 1.4 | not counted | 4,000 | not counted |" in text
    assert "| ratio |  | not counted | 125 | not counted |  |" in text
    assert "not counted, since this kernel does not" in text
    assert (tmp_path / "gradient_compression.png").exists()


@pytest.fixture(scope="module")
def report_dir(tmp_path_factory):
    """The folder of a reduced run's report, made from the command line."""
    folder = tmp_path_factory.mktemp("run") / "report"
    command = [sys.executable, "-W", "error", "-m", "tf_optimizers.demo"]
    part = ["--parts", "gradient-compression", "--quick"]
    subprocess.run(
        [*command, *part, "--report-dir", str(folder)],
        check=True,
        timeout=600,
    )
    return folder


@pytest.fixture
def result(report_dir):
    """What the reduced run wrote as JSON."""
    document = json.loads((report_dir / "results.json").read_text())
    return document["parts"]["gradient-compression"]


@pytest.fixture(params=range(len(PAIRS)), ids=PAIRS)
def pair(result, request):
    """What it found of a dense optimizer and a compressed one."""
    return result["pairs"][request.param]


@pytest.mark.long
def test_quick_run_trains_both_from_the_same_start(pair):
    dense, sparse = (
        {
            run["seed"]: run
            for run in pair["runs"]
            if run["optimizer"] == row["optimizer"]
        }
        for row in pair["optimizers"]
    )
    assert set(dense) == set(sparse) == {0, 1}
    for seed in dense:
        for run in (dense[seed], sparse[seed]):
            assert len(run["loss"]) == QUICK.epochs
            # Chance is 0.1 and 2.3: an optimizer that stands still would show.
            assert run["test_accuracy"] > 0.7
            assert run["loss"][-1] < run["loss"][0] / 2
    assert (pair["learning_rate"],) == QUICK.rates[pair["tuned"]]


@pytest.mark.long
@pytest.mark.skipif(sent_bytes() is None, reason="no counter of bytes")
def test_quick_run_counts_what_was_calculated(pair):
    traffic = pair["communication"]["total"]
    dense, sparse = pair["optimizers"]
    assert traffic["ratio"] > 8
    # Requests and reductions of metrics come on top, for both the same.
    for row, calculated in (
        (dense, traffic["dense_bytes"]),
        (sparse, traffic["sent_bytes"]),
    ):
        rest = row["bytes_per_step"] - calculated
        assert 0 < rest < 8000
    # All that is left is sent in the last step.
    last = [run["bytes_per_step"][-1] for run in pair["runs"]]
    assert 1 / QUICK.steps_per_epoch < last[-1] / last[0] < 0.3


@pytest.mark.long
def test_quick_report_equals_the_json(report_dir, result):
    text = (report_dir / "report.md").read_text()
    assert "## Gradient compression" in text and "reduced run" in text
    for row in report.comparison_rows(result):
        assert f"| {' | '.join(row)} |" in text
    names = set(re.findall(r"\]\(([^)]+)\)", text))
    assert names == {"results.json", "gradient_compression.png"}
    assert {path.name for path in report_dir.iterdir()} == names | {"report.md"}
