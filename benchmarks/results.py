"""Reads and writes results/*.json, which hold a result for each model."""

import argparse
import functools
import json
import pathlib
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

from tf_optimizers.demo.results import environment, write_json

FOLDER = pathlib.Path(__file__).parent / "results"
CODE = "tf_optimizers", "benchmarks", ":!benchmarks/results"


def path_of(benchmark: str) -> pathlib.Path:
    return FOLDER / f"{benchmark}.json"


def read(benchmark: str) -> dict[str, Any]:
    """Return the results of a benchmark that has been run."""
    return json.loads(path_of(benchmark).read_text())


@functools.cache
def commit(root: pathlib.Path = FOLDER.parents[1]) -> str | None:
    """Return the commit of the measured code, with "+" if files were changed.

    Returns None if the code is not in a Git repository.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL
        ).strip()

    try:
        changed = git("status", "--porcelain", "--", *CODE)
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def load(path: pathlib.Path | None) -> dict[str, Any]:
    """Return earlier results, with the environment and commit of this run."""
    is_new = path is None or not path.exists()
    document = {"models": {}} if is_new else json.loads(path.read_text())
    return document | environment() | {"commit": commit()}


def record(
    path: pathlib.Path | None,
    model: str,
    result: dict[str, Any],
    table: Callable[[str, dict], str] | None = None,
) -> None:
    """Write the result of one model; keep the results of other models.

    Args:
        path: The file; None to only print the table.
        model: The model's name.
        result: The new result, which replaces an earlier result.
        table: Takes model and result, and returns the text to print.
    """
    document = load(path)
    own = {key: document[key] for key in ("date", "commit")}
    document["models"][model] = result | own
    if path is not None:
        write_json(document, path)
    if table:
        print(table(model, result), end="\n\n", flush=True)


def options(
    script: str, description: str, models: Iterable[str] = (), **numbers: int
) -> argparse.ArgumentParser:
    """Return the parser of a script's command line; the script may extend it.

    Args:
        script: The script's path; the file of results has the same name.
        description: The script's docstring; the first line is shown.
        models: The models that can be measured; by default, all are measured.
        **numbers: Integer arguments, and their defaults.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=path_of(pathlib.Path(script).stem),
    )
    if models:
        parser.add_argument(
            "--models", nargs="+", choices=models, default=list(models)
        )
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser
