"""The demo: its data, its selection of learning rates, its report."""

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
from unittest import mock

import keras
import numpy as np
import pytest
from arrays import assert_equal
from cases import with_long
from progress import Progress
from rich.console import Console
from sklearn.datasets import load_digits

from tf_optimizers.demo import probe
from tf_optimizers.demo.__main__ import main
from tf_optimizers.demo.data import (
    SPLIT_SIZES,
    SklearnDigits,
    load_splits,
    prepare,
    shuffled_batches,
)
from tf_optimizers.demo.large_batch import batch_report, batch_study
from tf_optimizers.demo.large_batch.batch_study import Budget, Plan, Study
from tf_optimizers.demo.link import Forwarder
from tf_optimizers.demo.network import build_model, initial_weights
from tf_optimizers.demo.parts import (
    EXTRAS,
    FIRST_TUNING_SEED,
    PARTS,
    load_part,
)
from tf_optimizers.demo.results import write_json
from tf_optimizers.demo.start import hidden_unless_it_fails
from tf_optimizers.demo.trainer import Trainer, WarmupThenDecay
from tf_optimizers.demo.tuning import tune

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("when", ["download_and_prepare", "_split_generators"])
def test_other_worker_may_make_the_data_set_first(tmp_path, monkeypatch, when):
    """The other worker makes it after this one has looked for it, or begun."""
    method = getattr(SklearnDigits, when)
    builders = []

    def late(self, *args, **kwargs):
        if not builders:
            builders.append(None)
            builders[0] = prepare(tmp_path)
        return method(self, *args, **kwargs)

    monkeypatch.setattr(SklearnDigits, when, late)
    builders.append(prepare(tmp_path))
    for builder in builders:
        assert builder.info.splits.total_num_examples == 1797
        assert len(list(builder.as_dataset(split="test"))) == 387
    folder = builders[0].data_path.parent
    assert [path.name for path in folder.iterdir()] == ["1.0.0"]


def images_of(data_dir, split):
    """Return a split's images as stored, and their labels."""
    data = prepare(data_dir).as_dataset(split=split, as_supervised=True)
    images, labels = zip(*data.as_numpy_iterator(), strict=True)
    return np.stack(images), np.array(labels)


def test_data_set_holds_every_digit_once(data_dir):
    splits = [images_of(data_dir, name) for name in SPLIT_SIZES]
    assert [len(images) for images, _ in splits] == [1024, 386, 387]
    stored = np.concatenate([images for images, _ in splits])
    assert stored.dtype == np.uint8 and stored.shape[1:] == (8, 8, 1)
    assert stored.max() == 16
    labels = np.concatenate([labels for _, labels in splits])
    digits = load_digits()
    # As a sorted list, a repeated or lost image changes the comparison.
    expected = sorted(
        (image.astype(np.uint8).tobytes(), label)
        for image, label in zip(digits.images, digits.target, strict=True)
    )
    found = sorted(
        (image.tobytes(), label)
        for image, label in zip(stored, labels, strict=True)
    )
    assert found == expected


@pytest.mark.parametrize("split", SPLIT_SIZES)
def test_split_has_every_class_in_proportion(data_dir, split):
    _, labels = images_of(data_dir, split)
    counts = np.bincount(labels, minlength=10)
    share = np.bincount(load_digits().target) / 1797
    np.testing.assert_allclose(counts, share * len(labels), atol=1)


def test_loaded_images_are_scaled_to_one(data_dir):
    images, _ = next(iter(load_splits(data_dir)["train"].batch(1024)))
    assert images.numpy().min() == 0 and images.numpy().max() == 1


def test_shuffle_depends_only_on_the_seed(data_dir):
    data = load_splits(data_dir)["train"]

    def labels(seed):
        batches = shuffled_batches(data, 64, seed).take(20)
        return np.stack([label for _, label in batches.as_numpy_iterator()])

    np.testing.assert_array_equal(labels(1), labels(1))
    assert (labels(1) != labels(2)).any()
    # The second pass over the images has another order.
    assert (labels(1)[:4] != labels(1)[16:]).any()


def test_schedule_warms_up_and_decays():
    schedule = WarmupThenDecay()
    schedule.set(peak=0.5, steps=30)
    rates = [float(schedule(step)) for step in range(30)]
    assert np.argmax(rates) == 2 and rates[2] == 0.5
    np.testing.assert_allclose(np.diff(rates[:3]), 0.5 / 3, rtol=1e-5)
    np.testing.assert_allclose(np.diff(rates[2:]), -0.5 / 28, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    with_long(
        batch_study.OPTIMIZERS, set(batch_study.OPTIMIZERS) - {"tfo.LANS"}
    ),
)
def test_reset_trainer_equals_fresh_one(data_dir, name):
    data = shuffled_batches(load_splits(data_dir)["train"], 256, seed=3)
    used, fresh = (
        Trainer(build_model(0), batch_study.OPTIMIZERS[name]) for _ in range(2)
    )
    used.train(data, initial_weights(1), rate=0.1, steps=5)
    once = used.model.get_weights()
    for trainer in (used, fresh):
        trainer.train(
            shuffled_batches(load_splits(data_dir)["train"], 256, seed=4),
            initial_weights(2),
            rate=0.01,
            steps=7,
        )
    for reset, expected, before in zip(
        used.model.get_weights(), fresh.model.get_weights(), once, strict=True
    ):
        np.testing.assert_array_equal(reset, expected)
        assert (reset != before).any()
    assert_equal(used.optimizer.variables, fresh.optimizer.variables)


def test_later_runs_need_no_new_trace(data_dir):
    traces = []

    class Counting(keras.optimizers.SGD):
        def apply(self, *args, **kwargs):
            traces.append(1)
            return super().apply(*args, **kwargs)

    trainer = Trainer(build_model(0), Counting)
    data = load_splits(data_dir)["train"]
    counts = []
    # Keras 3.16 traces with the size of the first batch, and with any size once
    # a second one comes.
    runs = ((256, 0.1, 0), (1024, 0.01, 1), (512, 0.02, 2))
    for batch_size, rate, seed in runs:
        batches = shuffled_batches(data, batch_size, seed)
        weights = initial_weights(seed)
        trainer.train(batches, weights, rate, steps=batch_size // 128)
        counts.append(len(traces))
    assert counts[0] > 0
    assert counts[1] <= counts[0] + 1
    assert counts[2] == counts[1]


def test_choice_takes_best_mean_then_lowest_rate():
    reached = {
        0.1: (0.9, 0.7),
        0.2: (0.85, 0.85),
        0.4: (0.84, 0.86),
        0.8: (0.99, 0.1),
    }
    tuned = tune(list(reached), (0, 1), lambda rate, seed: reached[rate][seed])
    assert tuned["learning_rate"] == 0.2 and not tuned["at_edge_of_grid"]


class StubTrainer:
    """With higher rates, test accuracy rises, and validation accuracy falls."""

    def __init__(self):
        self.measured = {"validation": set(), "test": set()}

    def train(self, data, weights, rate, steps, callbacks):
        seeds = (0, 1, 2, 11, 12)
        (self.seed,) = [s for s in seeds if initial_weights(s) is weights]
        self.rate = rate

    def accuracy(self, images, labels):
        on_test = len(labels) == SPLIT_SIZES["test"]
        self.measured["test" if on_test else "validation"].add(self.seed)
        return self.rate if on_test else 1 - self.rate


def test_study_tunes_on_validation_and_tests_fresh_seeds(data_dir):
    plan = Plan((Budget(1024, 1),), (0.1, 0.2, 0.3), tuning_seeds=(11, 12))
    trainer = StubTrainer()
    tuned = Study(plan, (0, 1, 2), load_splits(data_dir), Progress())
    cell = tuned.cell("stub", trainer, *plan.budgets)
    assert cell["learning_rate"] == 0.1 and cell["at_edge_of_grid"]
    assert cell["test_accuracy"] == [0.1] * 3
    assert trainer.measured == {"validation": {11, 12}, "test": {0, 1, 2}}


@pytest.mark.parametrize("seeds", [(0, 1), (7, 8, 9)])
def test_study_trains_with_the_wanted_seeds(monkeypatch, seeds):
    settings = mock.Mock(quick=True, seeds=len(seeds), first_seed=seeds[0])
    monkeypatch.setattr(batch_study, "Study", mock.Mock())
    monkeypatch.setattr(batch_study, "load_splits", mock.Mock())
    monkeypatch.setattr(batch_study, "OPTIMIZERS", {})
    assert batch_study.run(settings, mock.Mock())["settings"]["seeds"] == seeds
    assert batch_study.Study.call_args.args[1] == seeds


@pytest.mark.parametrize("plan", [batch_study.FULL, batch_study.QUICK])
def test_plan_keeps_its_promises(plan):
    assert min(plan.tuning_seeds) >= FIRST_TUNING_SEED
    assert list(plan.rates) == sorted(plan.rates)
    for budget in plan.budgets:
        assert SPLIT_SIZES["train"] % budget.batch_size == 0
    full_batch = [
        budget
        for budget in plan.budgets
        if budget.batch_size == SPLIT_SIZES["train"]
    ]
    assert len(full_batch) == 2  # The plot of the grid has two panels.
    assert plan.curve_budget == max(full_batch, key=lambda each: each.steps)


def cell(name, mean, std, at_edge=False):
    """Return the part of a cell that the report's sentences use."""
    return {
        "optimizer": name,
        "batch_size": 1024,
        "epochs": 10,
        "steps": 10,
        "mean": mean,
        "std": std,
        "at_edge_of_grid": at_edge,
    }


def test_findings_follow_the_numbers():
    cells = [cell("A", 0.90, 0.01), cell("B", 0.93, 0.02), cell("C", 0.92, 0)]
    (line,) = batch_report.findings({"cells": cells})
    assert "B has the best mean, 93.0%" in line
    assert line.endswith(": C.")


def test_edge_note_names_cells_at_the_edge_only():
    inside, at_edge = cell("A", 0.9, 0), cell("B", 0.9, 0, at_edge=True)
    assert "None" in batch_report.edge_note([inside])
    note = batch_report.edge_note([inside, at_edge])
    assert note.endswith("outside: B at batch 1,024, 10 steps.")


def test_json_is_whole_or_untouched(tmp_path):
    path = tmp_path / "results.json"
    write_json({"loss": [1.5, float("nan")]}, path)
    assert json.loads(path.read_text()) == {"loss": [1.5, None]}
    with pytest.raises(TypeError):
        write_json({"loss": 0, "unwritable": object()}, path)
    assert json.loads(path.read_text()) == {"loss": [1.5, None]}
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def report_dir(data_dir, tmp_path_factory):
    """Return the folder of a reduced run's report."""
    folder = tmp_path_factory.mktemp("run") / "report"
    arguments = ["--quick", "--report-dir", str(folder), "--seeds", "3"]
    part = ["--parts", "large-batch"]
    assert main([*arguments, "--data-dir", str(data_dir), *part]) == 0
    return folder


@pytest.fixture
def results(report_dir):
    """Return the JSON of a reduced run."""
    return json.loads((report_dir / "results.json").read_text())


def markdown_tables(text):
    """Return each table of a page as {first cell: other cells}."""
    tables = re.findall(r"^\| optimizer .*\n(?:\|.*\n)+", text, re.MULTILINE)
    for table in tables:
        rows = [
            [entry.strip() for entry in line.strip("|").split("|")]
            for line in table.splitlines()
        ]
        yield {name: entries for name, *entries in rows[2:]}


@pytest.mark.long
def test_quick_run_fills_every_cell(results):
    cells = results["parts"]["large-batch"]["cells"]
    assert {cell["optimizer"] for cell in cells} == set(batch_study.OPTIMIZERS)
    assert len(cells) == len(batch_study.OPTIMIZERS) * 3
    for entry in cells:
        assert len(entry["test_accuracy"]) == 3
        means = {
            trial["learning_rate"]: np.mean(trial["validation_accuracy"])
            for trial in entry["tuning"]
        }
        assert means[entry["learning_rate"]] == max(means.values())
        # Chance is 0.1, which an optimizer that does not move would reach.
        assert entry["mean"] > 0.4
    assert results["quick"] is True
    assert results["environment"]["keras"] == keras.__version__


@pytest.mark.long
def test_quick_run_records_curves_of_one_budget(results):
    for entry in results["parts"]["large-batch"]["cells"]:
        curves = entry["curves"]
        if (entry["batch_size"], entry["steps"]) != (1024, 10):
            assert curves == {"loss": [], "accuracy": []}
            continue
        assert np.shape(curves["loss"]) == (3, 10)
        last = [run[-1] for run in curves["accuracy"]]
        assert last == entry["test_accuracy"]
        # A running mean over the steps could not fall this far.
        assert np.mean(curves["loss"], axis=0)[-1] < 0.6


@pytest.mark.long
def test_report_tables_equal_the_json(report_dir, results):
    accuracies, rates = markdown_tables((report_dir / "report.md").read_text())
    cells = results["parts"]["large-batch"]["cells"]
    for name in batch_study.OPTIMIZERS:
        own = [entry for entry in cells if entry["optimizer"] == name]
        percent = [100 * np.array(entry["test_accuracy"]) for entry in own]
        assert accuracies[name] == [
            f"{np.mean(runs):.1f} ± {np.std(runs, ddof=1):.1f}"
            for runs in percent
        ]
        assert rates[name] == [f"{entry['learning_rate']:.3g}" for entry in own]


@pytest.mark.long
def test_report_links_exist_and_plots_are_images(report_dir):
    text = (report_dir / "report.md").read_text()
    images = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert len(images) == 2
    for name in images:
        assert (report_dir / name).read_bytes().startswith(b"\x89PNG")
    links = re.findall(r"\]\(([^)]+)\)", text)
    names = {path.name for path in report_dir.iterdir()}
    assert set(links) | {"report.md"} == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "1"], "must be an integer of at least 2.*Received: 1."),
        (["--seeds", "two"], "must be an integer.*Received: two."),
        (["--parts", "huge"], "Received: huge. Use any of: large-batch"),
        (["--first-seed", "-1"], "must be an integer.*Received: -1."),
        (
            ["--first-seed", "9999", "--seeds", "3"],
            "must differ from the seeds.*begin at 10001. Received: .* 9999",
        ),
        (["--link", "fast"], "A link must have a rate.*Received: fast."),
        (["--report-dir", "{file}"], "must be a folder.*Choose another path"),
        (["--data-dir", "{file}/x"], "must be a folder.*Choose another path"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_argument_is_explained(arguments, message, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit) as stop:
        main([text.format(file=file) for text in arguments])
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_missing_loopback_is_explained(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(probe, "LOCALHOST", "192.0.2.1")  # Unused address.
    assert main(["--report-dir", str(tmp_path / "report")]) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert "need ports on the loopback interface. Received: [Errno" in message


def test_link_without_an_answer_is_explained(monkeypatch, tmp_path, capsys):
    def measure(names):
        monkeypatch.setattr("sys.executable", "true")
        Forwarder([])

    monkeypatch.setattr("tf_optimizers.demo.__main__.load_parts", measure)
    assert main(["--report-dir", str(tmp_path / "report")]) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert "Received: no answer from its process" in message


def test_interrupted_demo_ends_quietly(monkeypatch, tmp_path, capsys):
    def interrupt(names):
        raise KeyboardInterrupt

    monkeypatch.setattr("tf_optimizers.demo.__main__.load_parts", interrupt)
    assert main(["--report-dir", str(tmp_path / "report")]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("fails", [False, True])
def test_start_hides_output_unless_it_fails(fails, capfd):
    def start():
        with hidden_unless_it_fails():
            os.write(2, b"no GPU here\n")
            if fails:
                raise OSError("no memory")

    with pytest.raises(OSError) if fails else contextlib.nullcontext():
        start()
    os.write(2, b"after\n")
    said = capfd.readouterr().err
    assert said == "no GPU here\nafter\n" if fails else "after\n"


@pytest.mark.long
def test_nothing_stands_in_front_of_the_progress_bar(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-m", "tf_optimizers.demo"),
            *("--parts", "offload", "--quick", "--report-dir", tmp_path / "r"),
            *("--data-dir", tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("TF_")},
    )
    lines = [line for line in re.split("[\r\n]", done.stderr) if line.strip()]
    assert [line for line in lines if "|" not in line] == []
    assert re.match("offload +0%", lines[0])


@pytest.mark.parametrize("name", PARTS)
def test_closing_table_fits_the_terminal(name):
    """Check the committed run; no name may be cut."""
    results = json.loads((ROOT / "docs/demo/results.json").read_text())
    _, show = load_part(name)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(show.table(results["parts"][name]))
    text = console.export_text()
    assert "…" not in text
    names = {
        "large-batch": batch_study.OPTIMIZERS,
        "gradient-compression": ["SGD", "DGCMomentum", "AdamW", "SparseLoCo"],
        "offload": ["keras.optimizers.Adam", "AdamOffload"],
    }[name]
    for each in names:
        assert f" {each} " in text


def test_missing_extra_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(EXTRAS, "no_such_module", "no-such-package")
    assert main(["--report-dir", str(tmp_path / "report")]) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert "Missing: no-such-package." in message
    assert 'pip install "tf_optimizers[demo]"' in message
