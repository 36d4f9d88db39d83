"""How much memory does a step need, besides weights, gradients and state?

    python benchmarks/memory.py [--models bert-base]

The result is the largest rise of resident memory in three steps after the first
step. oneDNN is off, since TensorFlow's allocator for oneDNN never frees memory.
"""

import ctypes
import os
import pathlib
import re
from collections.abc import Callable

os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"

import keras
import numpy as np
import results
import step_time
import tables
import tensorflow as tf
import tqdm


def temporary_bytes(step: Callable) -> int:
    """Return the largest rise of resident memory in three steps."""
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    before = resident_bytes("VmRSS")
    for _ in range(3):
        step()
    return max(0, resident_bytes("VmHWM") - before)


def resident_bytes(kind: str) -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{kind}:\s+(\d+) kB", status).group(1))


def measure(name: str) -> dict:
    """Return the temporary memory of all contenders on one list of shapes."""
    shapes = step_time.MODELS[name]
    variables = [keras.Variable(tf.fill(shape, 0.02)) for shape in shapes]
    gradients = [tf.fill(shape, 0.01) for shape in shapes]
    found = {}
    for key, make in tqdm.tqdm(step_time.contenders().items(), desc=name):
        step = make(variables, gradients)
        step()
        found[key] = temporary_bytes(step)
    return {
        "largest_bytes": 4 * max(int(np.prod(shape)) for shape in shapes),
        "temporary_bytes": found,
    }


def main() -> None:
    parser = results.options(__file__, __doc__, step_time.MODELS)
    parser.set_defaults(models=["20M", "bert-base"])
    arguments = parser.parse_args()
    for name in arguments.models:
        result = measure(name)
        results.record(arguments.output, name, result, tables.memory)


if __name__ == "__main__":
    main()
