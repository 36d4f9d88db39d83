"""The README and docstrings are executed, and compared with the code."""

import ast
import configparser
import doctest
import inspect
import json
import pathlib
import re

import matplotlib
import numpy as np
import panels
import plots
import pytest
import results
import tables
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from PIL import Image
from real_workers import output_of

import tf_optimizers as tfo
from tf_optimizers import callbacks, schedules
from tf_optimizers.demo import report
from tf_optimizers.demo.gradient_compression import compression_plots
from tf_optimizers.demo.gradient_compression.clock import (
    behind,
    clock,
    seconds_to,
)
from tf_optimizers.demo.parts import load_part

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CLASSES = [
    tfo.AdamOffload,
    tfo.DGCMomentum,
    tfo.Lamb,
    tfo.LANS,
    tfo.SparseLoCo,
    callbacks.BackupAndRestore,
    callbacks.CompressionMonitor,
    callbacks.OffloadMonitor,
    callbacks.ShardingMonitor,
    callbacks.TrustRatioMonitor,
    schedules.LansSchedule,
]


def arguments_section(cls):
    docstring = inspect.getdoc(cls)
    return re.search(r"\nArgs:\n(.*?)\n\n", docstring, re.S).group(1)


@pytest.mark.parametrize(
    "code", re.findall(r"```python\n(.*?)```", README, re.S)
)
def test_readme_code_runs_and_learns(code):
    output = output_of(code, cwd=ROOT)
    losses = re.findall(r"loss: ([\d.e+-]+|nan)", output)
    assert float(losses[-1]) < 0.95 * float(losses[0])


def test_readme_is_read_in_a_minute():
    assert len(README.splitlines()) <= 120


def test_readme_has_both_commands():
    for name in ("demo", "tests"):
        assert re.search(rf"<!-- {name} -->\n```bash\n[^\n]+\n```", README)


@pytest.mark.parametrize(
    ("page", "image"),
    [
        ("README.md", "docs/demo/gradient_compression.png"),
        ("docs/index.md", "demo/gradient_compression.png"),
    ],
)
def test_first_screen_shows_the_committed_results(page, image):
    results = json.loads((ROOT / "docs/demo/results.json").read_text())
    result = results["parts"]["gradient-compression"]
    assert result["settings"]["link"] == "100 Mbit/s, 20 ms"
    text = (ROOT / page).read_text()
    first_screen = " ".join(text.split("| your situation |")[0].split())
    assert f"]({image})" in first_screen
    expected = []
    for group in result["groups"]:
        dense, sparse, *_ = group["optimizers"]
        slow, fast = (
            seconds_to(0.95, row, clock(row)) for row in (dense, sparse)
        )
        expected.append(f"{slow / fast:.1f}")
        assert f"`{sparse['optimizer']}`" in first_screen
        _, low, high = behind(dense, sparse)
        assert low <= 0 <= high  # "No difference at the end"
    assert re.findall(r"([\d.]+) times", first_screen) == expected


def test_oldest_versions_agree():
    """setup.cfg, tox.ini and the README state the same versions."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    least = dict(
        line.split(">=")
        for line in metadata["options"]["install_requires"].split()
    )
    least["python"] = metadata["options"]["python_requires"].removeprefix(">=")
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    oldest = tox["testenv:oldest"]
    tested = dict(line.split("==") for line in oldest["deps"].split())
    tested["python"] = oldest["base_python"].removeprefix("python")
    for name, version in least.items():
        assert tested[name] in (version, f"{version}.0")
    assert (
        f"Python {least['python']} or newer, "
        f"TensorFlow {least['tensorflow']} or newer, "
        f"and Keras {least['keras']} or newer." in " ".join(README.split())
    )


def test_readme_names_every_optimizer():
    for name in tfo.__all__:
        assert name in README


def test_tables_are_those_of_the_measured_json():
    text = tables.PAGE.read_text()
    assert tables.MARKED_TABLE.search(text)
    assert tables.fill_in(text) == text


def plot_of(line):
    return re.findall(r"\]\(benchmarks/(\w+)\.png\)", line)


def test_every_section_begins_with_a_finding_and_its_plot():
    sections = re.split(r"^##+ ", tables.PAGE.read_text(), flags=re.M)[1:]
    assert len(sections) == 14
    for section in sections:
        title, finding, plot, *_ = section.split("\n\n")
        assert re.match(r"[\w`\[]", finding), title
        assert plot_of(plot), title
        assert "<details" in section.split(plot)[1], title


def test_plots_are_those_of_the_measured_json(tmp_path, monkeypatch):
    committed = panels.FOLDER
    monkeypatch.setattr(panels, "FOLDER", tmp_path)
    plots.main()
    drawn = {path.stem for path in tmp_path.iterdir()}
    assert drawn == {path.stem for path in committed.iterdir()}
    assert sorted(drawn) == sorted(plot_of(tables.PAGE.read_text()))
    check_same_plots(tmp_path, committed)


def test_report_and_plots_of_the_demo_are_those_of_its_results(tmp_path):
    committed = ROOT / "docs" / "demo"
    document = json.loads((committed / "results.json").read_text())
    (tmp_path / "plots").mkdir()
    sections = [
        load_part(name)[1].section(result, tmp_path / "plots")
        for name, result in document["parts"].items()
    ]
    report.write_report(document, sections, tmp_path / "report.md")
    expected = (committed / "report.md").read_text()
    assert (tmp_path / "report.md").read_text() == expected
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {path.name for path in committed.glob("*.png")}
    check_same_plots(tmp_path / "plots", committed)


def check_same_plots(drawn, committed):
    for path in drawn.iterdir():
        new, old = (Image.open(f / path.name) for f in (drawn, committed))
        # Another version of Matplotlib draws other pixels.
        if matplotlib.__version__ in old.info["Software"]:
            np.testing.assert_array_equal(new, old, path.name)


def test_plots_of_the_first_screen_have_labels_that_a_phone_shows():
    """At 358 pixels, the width of a page's text on a screen of 390 pixels."""
    with Image.open(ROOT / "docs/demo" / compression_plots.FILE) as plot:
        dots_per_inch, _ = plot.info["dpi"]
    smallest = 10 / 72 * dots_per_inch  # "small" of 12 points
    assert smallest * 358 / plot.width > 9


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "{:.2f}") for name in ("step_time", "local_work", "fit")),
        ("sharded_state", "{:.2f}"),
        ("loco_network", "{:,.0f}"),
        ("local_schedule", "{:+.3f}"),
        ("run_bytes", "{:,.0f}"),
    ],
)
def test_plots_show_numbers_of_their_section(name, form, monkeypatch):
    figures = {}

    def keep(figure, path, **kwargs):
        figures[path.stem] = figure

    monkeypatch.setattr(Figure, "savefig", keep)
    for plot in plots.PLOTS[name]:
        plot(results.read(name))
    page = tables.PAGE.read_text().replace("a quarter", "0.25")
    (section,) = (
        section
        for section in re.split(r"^##+ ", page, flags=re.M)
        if name in plot_of(section)
    )
    shown = [
        value
        for axis in figures[name].axes
        for handle in axis.get_legend_handles_labels()[0]
        for value in values_of(handle)
        if np.isfinite(value)
    ]
    assert len(shown) >= 6
    for number in map(form.format, shown):
        assert re.search(rf"(?<![\d.]){re.escape(number)}\b", section), number


def values_of(handle):
    """Return the numbers that the bars or points of a legend's entry show."""
    if isinstance(handle, BarContainer):
        return handle.datavalues
    line = handle[0] if isinstance(handle, ErrorbarContainer) else handle
    return line.get_ydata()


def test_every_table_has_its_command():
    commands = (ROOT / "benchmarks" / "commands.sh").read_text()
    names = set(re.findall(r"^<!-- (\w+): ", tables.PAGE.read_text(), re.M))
    assert len(names) > 20
    assert names == set(re.findall(r"  # (\w+)(?:,.*)?$", commands, re.M))
    for script in re.findall(r"benchmarks/\w+\.py", commands):
        assert (ROOT / script).exists(), script
    for output in re.findall(r"--output (\S+)", commands):
        assert (ROOT / output).exists(), output


@pytest.mark.parametrize(
    "cls", [*CLASSES, tfo.SparseMultiWorkerMirroredStrategy]
)
def test_every_argument_is_documented_with_its_default(cls):
    section = arguments_section(cls)
    entries = dict(
        re.findall(r"^    (\**\w+): (.*?)(?=\n    \S|\Z)", section, re.S | re.M)
    )
    parameters = inspect.signature(cls).parameters
    names = [
        f"**{name}" if p.kind is p.VAR_KEYWORD else name
        for name, p in parameters.items()
    ]
    assert list(entries) == names
    for name, parameter in parameters.items():
        documented = re.search(
            r"Defaults\s+to\s+`(.*?)`", entries.get(name, "")
        )
        if parameter.default is parameter.empty:
            assert documented is None
        else:
            assert ast.literal_eval(documented.group(1)) == parameter.default


@pytest.mark.parametrize("cls", CLASSES)
def test_example_in_docstring_runs(cls):
    examples = doctest.DocTestFinder(recurse=False).find(cls, globs={})
    assert examples[0].examples
    results = doctest.DocTestRunner().run(examples[0])
    assert results.failed == 0


def messages():
    """Return the package's strings, with gaps in place of values."""
    for path in (ROOT / "tf_optimizers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", "") for part in node.values]
                yield "".join(p if isinstance(p, str) else "..." for p in parts)
            elif isinstance(node, ast.Constant):
                yield str(node.value)


def test_errors_in_docs_are_those_of_the_code():
    """Compare those of the package; the page marks errors of other packages."""
    text = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", text, re.M)
    documented = [
        message.strip("` ")
        for cell, meaning in rows
        if not meaning.startswith(("From Keras", "From TensorFlow"))
        for message in re.findall(r"`` .*? ``|`.*?`", cell)
    ]
    assert len(documented) > 10
    corpus = "\n".join(messages())
    for message in documented:
        for piece in message.split("..."):
            assert piece.strip() in corpus, message
