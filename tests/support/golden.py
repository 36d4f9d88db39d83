"""Trajectories of other libraries, and the errors of our optimizers.

The error of a tensor is max|a - b| / max|b|, at every step.
"""

import json
import pathlib

import keras
import numpy as np

FOLDER = pathlib.Path(__file__).parent / "trajectories"
TOLERANCE = 2e-5


def load(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def worst_error(record, optimizer, set_learning_rate=None):
    """Run a recorded trajectory and return the largest error of any step."""
    dtype = record["dtype"]
    variables = {
        name: keras.Variable(np.array(value, dtype), name=name, dtype=dtype)
        for name, value in record["params0"].items()
    }
    worst = 0.0
    for step in range(record["steps"]):
        if set_learning_rate:
            set_learning_rate(record["lr"][step])
        gradients = record["grads"][step]
        optimizer.apply(
            [np.array(gradients[name], dtype) for name in variables],
            list(variables.values()),
        )
        for name, variable in variables.items():
            expected = np.array(record["params_after"][step][name])
            scale = max(np.max(np.abs(expected)), 1e-30)
            difference = np.max(np.abs(variable.numpy() - expected))
            worst = max(worst, difference / scale)
    return worst
