"""The demo's gradient compression: its workers, its report."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
from launcher import assert_gone
from progress import Progress

from tf_optimizers.demo import link
from tf_optimizers.demo.__main__ import main
from tf_optimizers.demo.data import load_splits
from tf_optimizers.demo.gradient_compression import (
    compression_report,
    compression_study,
)
from tf_optimizers.demo.gradient_compression.clock import (
    behind,
    clock,
    seconds_to,
    summary,
)
from tf_optimizers.demo.gradient_compression.compression_study import (
    COMPRESSED,
    FULL,
    LOCAL,
    QUICK,
    choose_rates,
    make_optimizers,
)
from tf_optimizers.demo.link import NONE, Link
from tf_optimizers.demo.parts import FIRST_TUNING_SEED, Settings
from tf_optimizers.demo.processes import WorkersError, follow, run_workers
from tf_optimizers.demo.sockets import sent_bytes


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
    """Return a function that writes a module for workers to run."""

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


@pytest.mark.long
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
    assert "must end within 8 s. Received: workers still running." in message
    assert "waiting" in message
    started = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(started) == 2
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_failing_workers_fail_the_demo(module, monkeypatch, tmp_path, capfd):
    (command,) = module("raise SystemExit('this worker has no data')")
    monkeypatch.setattr(compression_study, "WORKER", command)
    arguments = ["--parts", "gradient-compression", "--quick"]
    folder = tmp_path / "report"
    assert main([*arguments, "--report-dir", str(folder)]) == 1
    assert "this worker has no data" in capfd.readouterr().err
    assert list(folder.iterdir()) == []


def test_interrupted_workers_leave_no_process(module, tmp_path):
    """Ctrl-C may reach only the demo itself."""
    # Import without the package, which would load TensorFlow three times.
    alone = f"import sys; sys.path.append({os.path.dirname(link.__file__)!r})\n"
    module(
        f"{alone}import os, pathlib, time\n"
        "from link import join\n"
        "numbers = [os.getpid(), join()._process.pid]\n"
        "for number in numbers:\n"
        f"    pathlib.Path({str(tmp_path)!r}, f'{{number}}.pid').touch()\n"
        "time.sleep(600)\n"
    )
    program = (
        f"{alone}import signal\n"
        "from processes import run_workers\n"
        # Tests in the background may ignore the signal.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "run_workers(['stub_worker'], 2, 600, None)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.DEVNULL
    ) as demo:
        for _ in range(600):
            started = [int(path.stem) for path in tmp_path.glob("*.pid")]
            if len(started) == 4:
                break
            time.sleep(0.1)
        demo.send_signal(signal.SIGINT)
        try:
            demo.wait(60)
        finally:
            demo.kill()
    assert len(started) == 4
    assert_gone(started)


@pytest.mark.parametrize("plan", [FULL, QUICK], ids=["full", "quick"])
def test_plan_keeps_its_promises(plan):
    assert min(plan.tuning_seeds) >= FIRST_TUNING_SEED
    for rates in plan.rates.values():
        assert list(rates) == sorted(rates)
    assert plan.batch_size % plan.workers == 0
    optimizers = make_optimizers(plan)
    assert list(optimizers) == [
        name
        for dense, others in COMPRESSED.items()
        for name in (dense, *others)
    ]
    for name in optimizers:
        assert plan.steps % plan.measured_after(name) == 0
    # Measuring weights within a round would end the round.
    assert plan.measured_after(LOCAL) == optimizers[LOCAL](0.1).sync_every
    dgc, loco = (
        [schedule.stages[schedule.stage(step)] for step in range(plan.steps)]
        for schedule in (
            optimizers[name](0.1)._schedule
            for name in ("DGCMomentum", "SparseLoCo")
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
    assert dgc[0] == 0.9375 and dgc[-1] == 0.0


def test_rates_are_validated_on_splits_of_their_own(data_dir, monkeypatch):
    """Each tuning seed trains on different images, never on the test split."""
    seen, validated = [], []

    class Stub:
        def __init__(self, model, make_optimizer):
            pass

        def train(self, batches, weights, rate, steps):
            images = next(iter(batches.unbatch().batch(1024)))[0]
            seen.append({image.tobytes() for image in images.numpy()})

        def accuracy(self, images, labels):
            validated.append({image.tobytes() for image in images})
            return 0.5

    monkeypatch.setattr(compression_study, "Trainer", Stub)
    plan = replace(QUICK, tuning_seeds=(11, 12))
    settings = Settings(2, 0, NONE, True, data_dir, data_dir)
    tuned = choose_rates(plan, settings, Progress())
    assert set(tuned) == set(COMPRESSED)
    for ours, held_out in zip(seen, validated, strict=True):
        assert not ours & held_out
    first, second, *again = seen
    assert first != second and again == [first, second]
    images = load_splits(data_dir)["test"].batch(387)
    test = {image.tobytes() for image in next(iter(images))[0].numpy()}
    assert not test & set.union(*seen, *validated)


LINK = Link(80e6, 0.02)  # 10 bytes per microsecond.


def made_up_run(seed, accuracies, seconds, sent, over_link):
    """Return a run of 12 steps, as the first worker does."""
    return {
        "seed": seed,
        "over_link": over_link,
        "steps": [4, 4, 4],
        "seconds": seconds,
        "bytes": sent,
        "accuracy": accuracies,
    }


def made_up_row(name, ends, seconds, sent, link=LINK, over_link=12):
    """Return the row of an optimizer whose seeds end at `ends`."""
    timed = 0 if link == NONE else over_link
    runs = [
        made_up_run(0, [0.5, 0.9, ends[0]], seconds, sent, timed),
        *(
            made_up_run(seed, [0.5, 0.9, end], [0.4, 0.4, 0.4], sent, 0)
            for seed, end in enumerate(ends[1:], 1)
        ),
    ]
    return {"optimizer": name, **summary(runs, link)}


def made_up_result(dense, sparse, link=LINK):
    """Return the result of a pair of rows, as `run` does."""
    group = {
        "optimizers": [dense, sparse],
        "tuned": "SGD",
        "tuning": [],
        "learning_rate": 0.1,
        "at_edge_of_grid": True,
    }
    return {
        "settings": {
            **asdict(QUICK),
            "seeds": [0, 1, 2],
            "warmup_share": 0.1,
            "sparsity": QUICK.schedule.sparsity,
            "local_steps": 8,
            "momentum": 0.9,
            "value_dtype": "int4",
            "split_sizes": {"train": 1024, "validation": 386, "test": 387},
            "link": str(link),
        },
        "measured": None if link == NONE else link._asdict(),
        "parameters": 12_345,
        "groups": [group],
    }


# 4 steps: 0.4 s alone, 0.1 s for a million bytes, 0.16 s for two round trips
# each.
SGD = made_up_row("SGD", (0.95, 0.97, 0.96), [0.66] * 3, [1_000_000] * 3)
# One round trip each: 0.08 s.
DGC_BYTES = [100_000, 10_000, 90_000]
DGC = made_up_row("DGC", (0.95, 0.95, 0.95), [0.49, 0.481, 0.489], DGC_BYTES)


def test_model_counts_round_trips_and_bytes():
    assert SGD["round_trips"] == pytest.approx(2.0)
    assert DGC["round_trips"] == pytest.approx(1.0)
    # The measured link, and one ten times slower: 1 s for a million bytes.
    np.testing.assert_allclose(clock(SGD, LINK), clock(SGD))
    slow = Link(LINK.rate / 10, LINK.round_trip)
    np.testing.assert_allclose(clock(SGD, slow), [1.56, 3.12, 4.68])
    np.testing.assert_allclose(clock(SGD, NONE), [0.4, 0.8, 1.2])


def test_steps_after_those_over_the_link_count_as_their_median():
    ends, sent = (0.95, 0.97, 0.96), [1_000_000] * 3
    row = made_up_row("SGD", ends, [0.6, 0.7, 0.1], sent, over_link=8)
    np.testing.assert_allclose(clock(row), [0.6, 1.3, 1.95])


def test_accuracy_is_reached_by_the_mean():
    # The means at the end are 96 and 95%.
    assert seconds_to(0.9, SGD, clock(SGD)) == pytest.approx(1.32)
    assert seconds_to(0.96, SGD, clock(SGD)) == pytest.approx(1.98)
    assert seconds_to(0.97, SGD, clock(SGD)) is None
    assert seconds_to(0.96, DGC, clock(DGC)) is None


def test_points_behind_are_seed_by_seed():
    # 0, 2 and 1 points; Student's factor of three seeds is 4.303.
    half = 4.303 / np.sqrt(3)
    expected = (1.0, 1 - half, 1 + half)
    assert behind(SGD, DGC) == pytest.approx(expected, abs=1e-3)
    assert behind(SGD, SGD) == (0.0, 0.0, 0.0)


def test_rows_are_computed_from_the_result():
    heading, dense, sparse = compression_report.rows(made_up_result(SGD, DGC))
    assert {len(row) for row in (dense, sparse)} == {len(heading)}
    assert dense == ["SGD", "1.3", "2.0", "never", "2.0", "3.0", ""]
    gap = "+1.0 (-1.5 to +3.5)"
    assert sparse == ["DGC", "1.0", "1.5", "never", "1.5", "0.2", gap]


def test_rows_by_link_are_those_of_the_model():
    heading, *rows = compression_report.rows_by_link(made_up_result(SGD, DGC))
    assert [row[0] for row in rows] == [
        f"{link}: {name}"
        for link in (
            "none",
            "1 Gbit/s, 20 ms",
            "100 Mbit/s, 20 ms",
            "10 Mbit/s, 20 ms",
        )
        for name in ("SGD", "DGC")
    ]
    assert {len(row) for row in rows} == {len(heading)}
    # 0.8 s for a million bytes at 10 Mbit/s.
    assert rows[-2][-1] == f"{3 * (0.4 + 0.8 + 0.16):.1f}"


@pytest.mark.parametrize(
    ("ends", "seconds", "expected"),
    [
        ((0.95, 0.95, 0.95), 0.1, "DGC reached 95% in 0.3 s, SGD in 2.0 s: "),
        ((0.95, 0.95, 0.95), 0.1, "6.6 times as fast"),
        ((0.95, 0.95, 0.95), 1.32, "it took 2.0 times as long"),
        ((0.94, 0.95, 0.95), 0.1, "DGC never reached 95%."),
        ((0.95, 0.96, 0.97), 0.1, "sent 15 times fewer bytes"),
        ((0.9501, 0.97, 0.96), 0.1, ": +0.0 points (95% interval: +0.0 to +0"),
        ((0.95, 0.96, 0.97), 0.1, ", not significant."),
        (
            (0.93, 0.95, 0.94),
            0.1,
            "+2.0 points (95% interval: +2.0 to +2.0), significant.",
        ),
        (
            (0.96, 0.98, 0.97),
            0.1,
            "-1.0 points (95% interval: -1.0 to -1.0), significant.",
        ),
    ],
)
def test_finding_follows_the_numbers(ends, seconds, expected):
    dgc = made_up_row("DGC", ends, [seconds] * 3, DGC_BYTES)
    assert expected in compression_report.finding(SGD, dgc)


def test_report_without_a_link_has_no_model(tmp_path):
    rows = [
        made_up_row(name, (0.95, 0.97, 0.96), [9.0, 9, 9], [1, 1, 1], NONE)
        for name in ("SGD", "DGC")
    ]
    result = made_up_result(*rows, link=NONE)
    result = json.loads(json.dumps(result, allow_nan=False))
    text = compression_report.section(result, tmp_path)
    assert "calculated, not measured" not in text
    assert "There was no link" in text and "without a link" in text
    # Seconds are medians over seeds.
    assert "| SGD | 0.8 | 1.2 | never | 1.2 |" in text


def test_report_without_counted_bytes_says_so(tmp_path):
    rows = [
        made_up_row(name, (0.95, 0.97, 0.96), [0.5] * 3, None)
        for name in ("SGD", "DGC")
    ]
    text = compression_report.section(made_up_result(*rows), tmp_path)
    assert "| SGD | 1.0 | 1.5 | never | 1.5 | not counted |  |" in text
    assert "MB: not counted, since this kernel does not" in text
    assert "calculated, not measured" not in text
    assert (tmp_path / "gradient_compression.png").exists()


def test_report_describes_the_link(tmp_path):
    text = compression_report.section(made_up_result(SGD, DGC), tmp_path)
    assert "Set to: 80 Mbit/s, 20 ms. Measured before the runs: " in text
    assert "80.0 Mbit/s, 20.0 ms." in text
    assert "fitted to this run: SGD 2.0, DGC 1.0." in text
    assert "+0 to +0% off" in text
    assert "This rate is at an edge of the grid." in text


@pytest.fixture(scope="module")
def report_dir(tmp_path_factory):
    """Return the folder of a reduced run's report, by the command line."""
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
    """Return the JSON of the reduced run."""
    document = json.loads((report_dir / "results.json").read_text())
    return document["parts"]["gradient-compression"]


@pytest.mark.long
def test_quick_run_trains_all_from_the_same_start(result):
    for group in result["groups"]:
        assert (group["learning_rate"],) == QUICK.rates[group["tuned"]]
        for row in group["optimizers"]:
            assert sum(row["steps"]) == QUICK.steps
            # Chance is 0.1, which an optimizer that does not move would reach.
            assert np.array(row["accuracy"]).shape == (2, len(row["steps"]))
            assert np.min(row["accuracy"], axis=0)[-1] > 0.7


@pytest.mark.long
def test_quick_run_took_the_time_of_the_link(result):
    measured = Link(**result["measured"])
    assert 60e6 < measured.rate < 101e6
    assert 0.02 <= measured.round_trip < 0.03
    for group in result["groups"]:
        for row in group["optimizers"]:
            # Each exchange takes at least one round trip.
            exchanges = 1 if row["optimizer"] == LOCAL else QUICK.measured_every
            assert min(row["seconds"]) > exchanges * 0.02
            trips = row["round_trips"] * row["steps"][0] / exchanges
            assert 0.5 < trips < 4


@pytest.mark.long
@pytest.mark.skipif(sent_bytes() is None, reason="no counter of bytes")
def test_quick_run_counts_sent_bytes(result):
    for group in result["groups"]:
        dense, sparse, *local = (row["bytes"] for row in group["optimizers"])
        least = 4 * result["parameters"] * QUICK.measured_every
        assert least < min(dense) and max(dense) < 1.2 * least
        assert sum(sparse) < sum(dense) / 8
        # The last step sends all residuals.
        assert 1 / QUICK.measured_every < sparse[-1] / dense[-1] < 0.5
        assert all(sum(each) < sum(sparse) for each in local)


@pytest.mark.long
def test_quick_report_equals_the_json(report_dir, result):
    text = (report_dir / "report.md").read_text()
    assert "## Gradient compression" in text and "reduced run" in text
    for row in [
        *compression_report.rows(result),
        *compression_report.rows_by_link(result),
    ]:
        assert f"| {' | '.join(row)} |" in text
    names = set(re.findall(r"\]\(([^)]+)\)", text))
    assert names == {"results.json", "gradient_compression.png"}
    assert {path.name for path in report_dir.iterdir()} == names | {"report.md"}
