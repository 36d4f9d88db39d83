"""What is known of a benchmark: one JSON, with a result for each model."""

import json
import pathlib
from typing import Any

from tf_optimizers.demo.results import environment, write_json


def load(path: pathlib.Path) -> dict[str, Any]:
    """Return what earlier runs have found, and where this one takes place."""
    document = json.loads(path.read_text()) if path.exists() else {"models": {}}
    return document | environment()


def record(path: pathlib.Path, model: str, result: dict[str, Any]) -> None:
    """Put down the result of one model; what is known of others stays."""
    document = load(path)
    document["models"][model] = result | {"date": document["date"]}
    write_json(document, path)
