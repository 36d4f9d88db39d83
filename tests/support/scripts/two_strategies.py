"""TensorFlow's strategy and ours in one script, behaviour by behaviour."""

import tensorflow as tf
from real_workers import report
from strategies import checkpoints, collectives, data, runs, variables
from strategies.table import as_json

import tf_optimizers as tfo

BEHAVIOURS = {
    f"{part.__name__.rpartition('.')[2]}: {name}": behaviour
    for part in (runs, collectives, variables, data, checkpoints)
    for name, behaviour in part.TABLE.items()
}


def observe(function, *strategies):
    """Return the result of a behaviour: a value, or an error."""
    try:
        return {"value": as_json(strategies[0], function(*strategies))}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}


def main():
    """Run all behaviours, under both strategies in turn."""
    stock = tf.distribute.MultiWorkerMirroredStrategy()
    ours = tfo.SparseMultiWorkerMirroredStrategy()
    results = {}
    for name, behaviour in BEHAVIOURS.items():
        print(name, flush=True)  # Shows where a process crashes, if it does.
        results[name] = {
            "stock": observe(behaviour.function, stock, ours),
            "ours": observe(behaviour.function, ours, stock),
        }
        if behaviour.instead:
            results[name]["instead"] = observe(behaviour.instead, stock, ours)
    report(results)


if __name__ == "__main__":
    main()
