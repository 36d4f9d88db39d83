"""What benchmarks have found: results/*.json, with a result for each model."""

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
    """Return what is known of a benchmark that has been run."""
    return json.loads(path_of(benchmark).read_text())


def load(path: pathlib.Path) -> dict[str, Any]:
    """Return what earlier runs have found, and where this one takes place."""
    document = json.loads(path.read_text()) if path.exists() else {"models": {}}
    return document | environment()


def record(
    path: pathlib.Path,
    model: str,
    result: dict[str, Any],
    table: Callable[[str, dict], str] | None = None,
) -> None:
    """Put down the result of one model; what is known of others stays.

    Args:
        path: The file.
        model: Of that name.
        result: Replaces an earlier one.
        table: Makes of model and result what is printed.
    """
    document = load(path)
    document["models"][model] = result | {"date": document["date"]}
    write_json(document, path)
    if table:
        print(table(model, result), end="\n\n", flush=True)


def options(
    script: str, description: str, models: Iterable[str] = (), **numbers: int
) -> argparse.ArgumentParser:
    """Return the command line of a script, which may add to it.

    Args:
        script: Its path, which names the file of results, too.
        description: Its docstring, of which the first line is shown.
        models: What can be measured, all unless told otherwise.
        **numbers: Arguments that are whole numbers, and their defaults.
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
