"""Runs notebooks at full size, and keeps their outputs.

python colab/run_notebooks.py colab/quickstart.ipynb
python colab/run_notebooks.py --check colab/*.ipynb
"""

import argparse
import hashlib
import os
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

QUICK = "TF_OPTIMIZERS_QUICK"
DIGEST = "code_digest"
LIMIT = 900  # seconds of a cell

# Messages about the machine that TensorFlow writes while it is imported.
IMPORT_LOG = re.compile(r"([IWE]0000 .*|WARNING: All log messages before .*)\n")


def main() -> None:
    """Run the notebooks on the command line, one after another."""
    parser = argparse.ArgumentParser(
        description="Run notebooks and write their outputs into them."
    )
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument(
        "--check",
        action="store_true",
        help="run at reduced size, and write nothing",
    )
    options = parser.parse_args()
    os.environ.pop(QUICK, None)
    if options.check:
        os.environ[QUICK] = "1"
    for path in options.notebooks:
        notebook = run(path)
        if not options.check:
            nbformat.write(notebook, path)


def run(path: Path) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of a run in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=LIMIT,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if not is_log(o)]
    notebook.metadata[DIGEST] = digest(notebook)
    return notebook


def is_log(output: nbformat.NotebookNode) -> bool:
    """Return whether an output only has messages of TensorFlow's import."""
    text = output.get("text", "")
    return output.get("name") == "stderr" and not IMPORT_LOG.sub("", text)


def is_install(cell: nbformat.NotebookNode) -> bool:
    """Return whether a cell installs the package."""
    return "install" in cell.metadata.get("tags", ())


def digest(notebook: nbformat.NotebookNode) -> str:
    """Return a digest of the code that the outputs come from.

    The cell that installs the package does not count.
    """
    sources = [
        cell.source
        for cell in notebook.cells
        if cell.cell_type == "code" and not is_install(cell)
    ]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
