"""Reads and writes results/*.json, which hold a result for each model."""

import argparse
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from tf_optimizers.demo.results import environment, write_json

FOLDER = pathlib.Path(__file__).parent / "results"


def path_of(benchmark: str) -> pathlib.Path:
    return FOLDER / f"{benchmark}.json"


def read(benchmark: str) -> dict[str, Any]:
    """Return the results of a benchmark that has been run."""
    return json.loads(path_of(benchmark).read_text())


def load(path: pathlib.Path) -> dict[str, Any]:
    """Return earlier results, with the environment of this run."""
    document = json.loads(path.read_text()) if path.exists() else {"models": {}}
    return document | environment()


def record(
    path: pathlib.Path,
    model: str,
    result: dict[str, Any],
    table: Callable[[str, dict], str] | None = None,
) -> None:
    """Write the result of one model; keep the results of other models.

    Args:
        path: The file.
        model: The model's name.
        result: The new result, which replaces an earlier result.
        table: Takes model and result, and returns the text to print.
    """
    document = load(path)
    document["models"][model] = result | {"date": document["date"]}
    write_json(document, path)
    if table:
        print(table(model, result), end="\n\n", flush=True)


def options(
    script: str, description: str, models: Iterable[str] = (), **numbers: int
) -> argparse.ArgumentParser:
    """Return the parser of a script's command line, which it may extend.

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
