"""Results as JSON, with the environment of the measurements."""

import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_optimizers as tfo


def environment() -> dict[str, Any]:
    """Return versions and hardware, which the numbers depend on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "tf_optimizers": tfo.__version__,
        "cpu_cores": os.cpu_count(),
        "gpus": len(tf.config.list_physical_devices("GPU")),
    }


def write_json(document: dict[str, Any], path: Path) -> None:
    """Write a document; if interrupted, leave the old file unchanged."""
    text = json.dumps(_finite(document), indent=1, allow_nan=False)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot hold, with null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
