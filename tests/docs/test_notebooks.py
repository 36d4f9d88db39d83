"""The notebooks run, and their outputs match their code."""

import os
import pathlib
import re
import subprocess
import sys

import home
import nbformat
import pytest
import run_notebooks
from real_workers import python_path

import tf_optimizers

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = pathlib.Path(tf_optimizers.__file__).parent.parent
PATHS = sorted((ROOT / "colab").glob("*.ipynb"))
BADGE = (
    "https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/"
    f"{home.url().removeprefix('https://github.com/')}/"
)
MACHINE_PATH = re.compile(
    r"(?<![\w.:/])/(tmp|home|root|work|usr|opt|var|content)/|site-packages"
)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell):
    """Return the text outputs of a cell."""
    for output in cell.outputs:
        yield output.get("text", "")
        yield output.get("data", {}).get("text/plain", "")


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def notebook(request):
    read = nbformat.read(request.param, as_version=4)
    nbformat.validate(read)
    return read


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_runs_at_reduced_size(path, tmp_path):
    done = subprocess.run(
        [sys.executable, run_notebooks.__file__, "--check", path],
        env={
            **os.environ,
            "PYTHONPATH": python_path(PACKAGE),
            "JUPYTER_PLATFORM_DIRS": "1",
            "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
            "IPYTHONDIR": str(tmp_path / "ipython"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-5000:]


def test_begins_with_its_own_badge(notebook, request):
    """Until the repository has an owner, a comment hides the broken link."""
    path = request.node.callspec.params["notebook"]
    _, badge, *_ = notebook.cells[0].source.split("\n\n")
    is_unknown = home.UNKNOWN in home.url()
    badge, hidden = re.subn(r"<!-- (.*) -->", r"\1", badge)
    assert hidden == is_unknown
    assert badge == f"[![Open In Colab]({BADGE}blob/main/colab/{path.name})"


def test_installs_only_in_its_first_cell(notebook):
    first = code_cells(nbformat.read(PATHS[0], as_version=4))[0]
    assert code_cells(notebook)[0].source == first.source
    for cell in code_cells(notebook)[1:]:
        assert "pip" not in cell.source.split()


def test_outputs_are_of_this_code_run_from_top_to_bottom(notebook):
    cells = code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    expected = run_notebooks.digest(notebook)
    assert notebook.metadata[run_notebooks.DIGEST] == expected, (
        f"Run `python {ROOT / 'colab' / 'run_notebooks.py'}`."
    )


def test_outputs_have_plots_and_no_errors(notebook):
    outputs = [o for cell in code_cells(notebook) for o in cell.outputs]
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 2
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"]


def test_outputs_name_the_data(notebook):
    shown = "".join(t for cell in code_cells(notebook) for t in texts(cell))
    assert re.search(r"\b(digits|mnist)\b", shown)


def test_outputs_name_no_path_of_a_machine(notebook):
    for cell in code_cells(notebook):
        for text in [cell.source, *texts(cell)]:
            assert not MACHINE_PATH.search(text), text


def test_links_lead_to_files(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", cell.source):
                assert (ROOT / "colab" / target).exists(), target


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_file_is_small(path):
    assert path.stat().st_size < 400_000
