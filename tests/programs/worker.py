"""Runs programs, one after another: `python worker.py FOLDER DEVICES`.

The n-th program is FOLDER/n.json, and its result FOLDER/n-WORKER.pickle. Every
worker of a group runs this.
"""

import gc
import json
import os
import pathlib
import pickle
import random
import resource
import sys
import time
import traceback
import types
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from quick_graphs import (
    compile_in_fewer_passes,
    leave_data_untuned,
    leave_graphs_as_traced,
)

import tf_optimizers as tfo
from tf_optimizers.compression import exchanges
from tf_optimizers.compression.exchanges import LEAST_SAVING

EMBEDDING = keras.layers.Embedding
# Seconds between two looks for the next program.
PAUSE = 0.01


class OnlyOne(tf.distribute.MirroredStrategy):
    """The only one in a process: TensorFlow confuses the collectives of two."""

    def __new__(cls, *_):
        return _only_one() or super().__new__(cls)

    def __init__(self, devices):
        if _only_one() is None:
            super().__init__(devices)
            ONLY.append(self)


ONLY: list[OnlyOne] = []


def _only_one():
    return ONLY[0] if ONLY else None


def set_up(devices):
    """Use few threads; create several replicas in one process."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(4)
    if "TENSORFLOW_DEFAULTS" not in os.environ:
        leave_data_untuned()
        compile_in_fewer_passes()
    if "TF_CONFIG" not in os.environ and devices > 1:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * devices,
        )
    tf.distribute.MirroredStrategy = OnlyOne
    patience = float(os.environ["PROGRAMS_PATIENCE"])
    tfo.SparseMultiWorkerMirroredStrategy.agreement_seconds = patience


def reset_process():
    """Restore the state of a new process."""
    sys.modules.pop("script", None)
    if "TENSORFLOW_DEFAULTS" not in os.environ:
        leave_graphs_as_traced()
    keras.utils.clear_session()
    keras.layers.Embedding = EMBEDDING  # Scripts may replace it.
    # Exclude remaining objects, such as imports, from garbage collection, which
    # would take a third of the time.
    gc.freeze()
    # This also resets the dtype policy of layers.
    keras.config.set_floatx("float32")
    exchanges.LEAST_SAVING = LEAST_SAVING  # Scripts may replace it.
    random.seed()
    np.random.seed()
    tf.random.set_seed(None)


def execute(script, folder):
    """Run a script in a folder; return its results, and its error if any."""
    reset_process()
    os.chdir(folder)
    module = sys.modules["script"] = types.ModuleType("script")
    names = vars(module)
    cpu = cpu_seconds()
    result = {"error": None}
    told = []
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            exec(compile(script.read_text(), str(script), "exec"), names)
    except Exception as error:
        result["error"] = describe(error)
    result["warnings"] = sorted({str(one.message) for one in told})
    result["seen"] = in_plain_values(names.get("seen", {}))
    try:
        result["replicas"] = replicas(names)
        result["left"] = state_of(names)
    except Exception as error:
        result["error"] = result["error"] or describe(error)
    result["cpu"] = cpu_seconds() - cpu
    return result


def in_plain_values(seen):
    """Return numbers, arrays and texts unchanged, and the class of others.

    Values of a history become numbers, since variables would change later.
    """
    if isinstance(seen, dict):
        return {key: in_plain_values(value) for key, value in seen.items()}
    if isinstance(seen, (list, tuple)):
        return [in_plain_values(value) for value in seen]
    if isinstance(seen, (bool, int, float, str, np.ndarray, np.generic)):
        return seen
    if isinstance(seen, tf.Tensor):
        return np.array(seen)
    return f"a {type(seen).__name__}"


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def describe(error):
    """Return an error's class, text and origin."""
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "class": type(error).__name__,
        "classes": [base.__name__ for base in type(error).__mro__],
        "text": str(error),
        "ours": "tf_optimizers" in pathlib.Path(frames[-1].filename).parts,
        "traceback": "".join(traceback.format_exception(error)),
    }


def variables_of(names):
    model = names.get("model")
    if model is None or not model.built:
        return [], []
    optimizer = getattr(model, "optimizer", None) or names.get("optimizer")
    if optimizer is not None and not optimizer.built:
        optimizer = None
    return model.variables, optimizer.variables if optimizer else []


def replicas(names):
    """Return each device's values of common variables."""
    found = {}
    strategy = names.get("strategy")
    if strategy is None:
        return found
    optimizer = getattr(names.get("model"), "optimizer", None)
    optimizer = optimizer or names.get("optimizer")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    weights, state = variables_of(names)
    if isinstance(optimizer, tfo.ShardedState):
        state = []  # Variables of owners.
    for number, variable in enumerate([*weights, *state]):
        if is_common(variable, optimizer):
            found[f"{number} {variable.path}"] = [
                np.array(local)
                for local in strategy.experimental_local_results(variable.value)
            ]
    return found


def is_common(variable, optimizer):
    """Return whether a variable must be equal on all replicas."""
    value = variable.value
    if variable.path.endswith("_gradient_accumulator"):
        return False  # Accumulated gradients of a replica, until the update.
    is_on_host = not isinstance(value, tf.distribute.DistributedValues)
    if is_on_host and isinstance(optimizer, tfo.SparseLoCo):
        return False  # State of a worker's local steps.
    mode = getattr(value, "synchronization", None)
    return mode != tf.VariableSynchronization.ON_READ


def state_of(names):
    """Return the weights, the numbers of steps, and loss scales."""
    weights, state = variables_of(names)
    steps, scales = (
        [np.array(v).item() for v in state if v.path.endswith(ending)]
        for ending in (("iteration", "iterations"), "dynamic_scale")
    )
    return {
        "weights": [np.array(variable) for variable in weights],
        "steps": [max(steps)] if steps else [],
        "scales": scales,
    }


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def serve(folder):
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
    index = task.get("index", 0)
    number = 0
    while True:
        path = folder / f"{number}.json"
        while not path.exists():
            if not is_alive(int(os.environ["PROGRAMS_OWNER"])):
                return
            time.sleep(PAUSE)
        order = json.loads(path.read_text())
        script = folder / f"{number}.py"
        result = execute(script, order["folder"])
        partial = folder / f"{number}-{index}.partial"
        partial.write_bytes(pickle.dumps(result))
        partial.rename(folder / f"{number}-{index}.pickle")
        number += 1


if __name__ == "__main__":
    set_up(int(sys.argv[2]))
    serve(pathlib.Path(sys.argv[1]))
