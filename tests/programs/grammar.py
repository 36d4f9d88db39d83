"""The features of programs, and their scripts.

A program is a dict with one value for each feature of `FEATURES`, and the first
value of a feature is its plainest. `draw` makes one at random, `rules.py` says
which features can be combined, and `script` writes it as a user would.

With `ideal=True`, a script leaves out everything that must not matter, such as
an interruption. One process runs this script.
"""

import re
import textwrap

from .loops import (
    APPLY,
    ARGS,
    MEANS,
    SCALES,
    conservation_text,
    exchange_text,
    loop_text,
)
from .models import (
    BODIES,
    CUSTOM,
    FAMILIES,
    HELPERS,
    LAST,
    LOSSES,
    METRICS,
    OPTIMIZERS,
    SHAPES,
    TASKS,
    WRAPPERS,
)
from .own import (
    DRAWN,
    HELD_AS,
    HOLDERS,
    IDEAL_OF_OURS,
    JOINED,
    RETURNED,
    STEPS,
    with_draws,
    with_held,
    with_step,
)
from .rules import (
    ADDED,
    COMPARED,
    FILES,
    OF_COMPRESSION,
    OF_LOOPS,
    OWN_METRICS,
    RATELESS,
    RULES,
    SHUFFLED,
    SUMS,
    is_allowed,
)

# The values of each feature, with their weights.
FEATURES = {
    # The place.
    "where": {
        **{"2": 7, "devices": 4, "3": 3, "2x2": 3, "1": 2, "mirrored": 2},
        **{"elsewhere": 1},
    },
    "seeded": {True: 3, False: 2},
    "graphs": {"as traced": 3, "optimized": 1},
    # A script calls `fit`, has a custom loop, or counts sent values.
    "script": {"Keras": 14, "loop": 4, "conservation": 1},
    "args": dict.fromkeys(ARGS, 1),
    "mean": dict.fromkeys(MEANS, 1),
    "apply": dict.fromkeys(APPLY, 1),
    "loop": {"function": 2, "graph": 1, "eager": 1},
    "shared as": {"dataset": 3, "its own": 1},
    "built": {"at once": 1, "by the first step": 1},
    "scales": dict.fromkeys(SCALES, 1),
    "wire": dict.fromkeys(
        ["float32", "float16", "bfloat16", "int4", "int2"], 1
    ),
    "exchange": {"any": 1, "gathered": 1, "sharded": 2},
    # The model.
    "family": {"layers": 16} | dict.fromkeys(FAMILIES, 1),
    "input": {"vector": 5, "image": 3, "series": 3, "tokens": 4},
    "layers": None,  # A list of some of `BODIES`.
    "style": {
        "sequential": 6,
        "functional": 3,
        "lazy": 2,
        "subclassed": 3,
        "nested": 2,
        "twins": 1,
        "two inputs": 1,
        "two outputs": 1,
    },
    "custom": {"none": 14} | dict.fromkeys(CUSTOM, 1),
    "step": {"def": 3} | dict.fromkeys(STEPS[1:], 1),
    "test step": {"Keras's": 3, "another name": 1},
    "returned": {"metrics": 3} | dict.fromkeys(list(RETURNED)[1:], 1),
    "drawn": {"nothing": 8} | dict.fromkeys(list(DRAWN)[1:], 1),
    "held by": {"nobody": 8} | dict.fromkeys(HOLDERS, 1),
    "held as": dict.fromkeys(HELD_AS, 1),
    "aggregation": {
        **{"none": 3, "mean": 1, "sum": 1, "only_first_replica": 1},
    },
    "precision": {
        "float32": 12,
        "mixed_float16": 1,
        "mixed_bfloat16": 1,
        "float64": 1,
        "bfloat16": 1,
        "float16": 1,
    },
    # The data.
    "batch": {4: 4, 6: 3, 8: 2, 3: 2, 2: 1, 5: 1, 12: 1},
    "batches": {2: 3, 3: 3, 1: 1, 4: 1},
    "rest": {0: 4, 1: 4, 2: 1, 3: 1},
    "source": {
        "arrays": 6,
        "tf.data": 8,
        "generator": 2,
        "from_generator": 1,
        "PyDataset": 3,
        "TFRecords": 2,
        "text": 1,
    },
    "pipeline": None,  # A list of some of `PIPELINE`.
    "shuffle": {
        "none": 10,
        "shuffle": 4,
        "seeded": 2,
        "before": 1,
        "in map": 1,
        "in flat_map": 1,
        "random filter": 1,
        "two": 1,
        "np.random": 2,
        "in interleave": 1,
        "in files": 1,
    },
    "emptied": {"none": 10, "first": 1, "second": 1, "last": 1, "filter": 1},
    "policy": {"AUTO": 12, "FILE": 1},
    "vocabulary": {"none": 10, "set": 1},
    "fetched": {"by one": 6, "threads": 1, "processes": 1},
    "distributed": {False: 10, True: 1},
    "branches": {"none": 10, "fit": 1, "data": 1},
    "looked at": {"not": 7, "by all": 1, "by the chief": 2},
    "weights": {"none": 6, "sample": 2, "class": 1, "zeros": 1},
    "validation": {"none": 4, "data": 2, "split": 1, "generator": 1},
    "epochs": {2: 4, 1: 3, 3: 1},
    "steps": {"none": 6, "fewer": 1, "repeat": 1},
    "scale": {
        **{"ordinary": 12, "huge": 1, "one row": 1, "a scaled row": 1},
        **{"enormous": 1},
    },
    # The task.
    "task": {"regression": 5, "binary": 2, "classes": 3, "onehot": 2},
    "loss": None,  # One of `LOSSES[task]`.
    "metrics": None,  # A list of some of `METRICS[task]`.
    # Training.
    "optimizer": {"SGD": 4} | dict.fromkeys(list(OPTIMIZERS)[1:], 1),
    "wrapper": {
        **{"none": 12} | dict.fromkeys(list(WRAPPERS)[1:], 1),
        **{"ShardedState": 4, "LossScale": 3},
    },
    "rate": {"constant": 6, "schedule": 1},
    "clip": {"none": 10, "clipnorm": 1, "global_clipnorm": 1, "clipvalue": 1},
    "average": {"none": 8, "ema": 1, "ema overwrites": 1},
    "accumulate": {1: 8, 2: 1},
    "exclude": {"none": 8, "list": 1, "names": 1},
    "another model": {"none": 12, "on all": 1, "on the chief": 1},
    "frozen": {"none": 12, "first": 2},
    "made": {
        **{"inside": 8, "optimizer outside": 1, "compile outside": 1},
        **{"build outside": 1},
    },
    "eagerly": {False: 9, True: 1},
    "steps_per_execution": {1: 9, 2: 1},
    # Actions.
    "callbacks": None,  # A list of some of `CALLBACKS`.
    "interrupt": {"none": 12, "epoch": 1, "batch": 1},
    "actions": None,  # A list of some of `ACTIONS`, after the first `fit`.
}

PIPELINE = {
    "cache": "data = data.cache()",
    "prefetch": "data = data.prefetch(2)",
    "map": "data = data.map(lambda *row: row, num_parallel_calls=2)",
    "filter": "data = data.filter(lambda *row: True)",
    "drop_remainder": "",
    "flat_map": (
        "data = data.flat_map(\n"
        "    lambda *row: tf.data.Dataset.from_tensors(row)\n"
        ")"
    ),
    "unbatch": "data = data.batch(5).unbatch()",
    "interleave": (
        "data = tf.data.Dataset.range(2).interleave(\n"
        "    lambda part: data.shard(2, part), 2, num_parallel_calls=2\n"
        ")"
    ),
    "concatenate": "data = data.take(2).concatenate(data.skip(2))",
    "take": f"data = data.take({10**6})",
}
CALLBACKS = {
    "LambdaCallback": (
        "keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: "
        'seen.setdefault("logs", []).append(dict(logs)))'
    ),
    "Logging": (
        "keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: "
        'seen.setdefault("rates", []).append([\n'
        "            float(model.optimizer.learning_rate), "
        "int(model.optimizer.iterations)\n        ]))"
    ),
    "TerminateOnNaN": "keras.callbacks.TerminateOnNaN()",
    "EarlyStopping": (
        'keras.callbacks.EarlyStopping("loss", patience=1, '
        "restore_best_weights=True)"
    ),
    "ReduceLROnPlateau": (
        'keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=9.0)'
    ),
    "LearningRateScheduler": (
        "keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))"
    ),
    "ModelCheckpoint": (
        "keras.callbacks.ModelCheckpoint(\n"
        '            folder / "checkpoint.weights.h5", save_weights_only=True\n'
        "        )"
    ),
    "CSVLogger": 'keras.callbacks.CSVLogger(folder / "log.csv")',
    "SwapEMAWeights": "keras.callbacks.SwapEMAWeights(swap_on_epoch=True)",
    "Drawing": "Drawing()",
    **{
        name: f"{name}()"
        for name in ("Copying", "Writing", "Evaluating", "Predicting")
    },
    "BackupAndRestore": 'tfo.callbacks.BackupAndRestore("backup")',
}
# Data of other kinds than the first `fit` has.
KINDS = {
    "arrays": "",
    "a dataset": (
        "others = tf.data.Dataset.from_tensor_slices(({columns}))"
        ".batch({batch})\n"
    ),
    "a dataset without length": (
        "others = tf.data.Dataset.from_tensor_slices(({columns}))"
        ".batch({batch})\n"
        "others = others.filter(lambda *batch: True)\n"
    ),
    "a PyDataset": """class Others(keras.utils.PyDataset):
    def __len__(self):
        return -(-rows // {batch})

    def __getitem__(self, index):
        return tf.nest.map_structure(
            lambda part: part[index * {batch} :][:{batch}], ({columns})
        )


""",
    "a generator": """def others():
    for start in range(0, rows, {batch}):
        yield tf.nest.map_structure(
            lambda part: part[start : start + {batch}], ({columns})
        )


""",
}
ACTIONS = {
    "evaluate": "{evaluate}",
    "predict": "{predict}",
    "predict others": (
        "with strategy.scope():\n"
        "    other = keras.Model(model.inputs, [\n"
        '        ops.cast(model.outputs[0] > 0.2, "bool"),\n'
        '        ops.cast(100 * model.outputs[0], "int8"),\n'
        '        ops.cast(model.outputs[0], "bfloat16"),\n'
        "    ])\n"
        'seen["predict others"] = other.predict(x, batch_size=4, verbose=0)'
    ),
    "predict a mean": (
        "with strategy.scope():\n"
        "    other = keras.Model(model.inputs, ops.mean(\n"
        "        model.outputs[0], 0, keepdims=True\n"
        "    ))\n"
        "many = np.concatenate([some(x, 4)] * 8)\n"
        'seen["predict a mean"] = other.predict(many, verbose=0)'
    ),
    "metric outside": (
        "with strategy.scope():\n"
        "    metric = keras.metrics.MeanIoU(2)\n"
        "for _ in range(3):\n"
        "    metric.update_state([0, 1, 1, 0], [0, 1, 0, 0])\n"
        'seen["metric outside"] = [\n'
        "    float(metric.result()), float(np.sum(metric.total_cm))\n]"
    ),
    "apply outside": (
        "weights = model.trainable_variables\n"
        "keras.optimizers.SGD(0.1).apply(\n"
        "    [ops.zeros_like(weight) for weight in weights], weights\n)"
    ),
    "predict one row": (
        'seen["one row"] = model.predict(some(x, 1), verbose=0)'
    ),
    "predict_on_batch": (
        'seen["predict_on_batch"] = model.predict_on_batch(some(x, 5))'
    ),
    "test_on_batch": (
        'seen["test_on_batch"] = model.test_on_batch(\n'
        "    some(x, 4), some(y, 4), return_dict=True\n"
        ")"
    ),
    "train_on_batch": (
        'seen["train_on_batch"] = model.train_on_batch(\n'
        "    some(x, 5), some(y, 5), return_dict=True\n"
        ")\n{note}"
    ),
    "fit": "{fit}",
    **{f"fit {kind}": "{others}" for kind in KINDS},
    "freeze": "model.layers[0].trainable = False\n{fit}",
    "thaw": "model.layers[0].trainable = True\n{fit}",
    "freeze, compile": ("model.layers[0].trainable = False\n{compile}\n{fit}"),
    "set rate": "model.optimizer.learning_rate = 0.03\n{fit}",
    "save, load": (
        'model.save(folder / "model.keras")\n'
        "with strategy.scope():\n"
        '    model = keras.models.load_model(folder / "model.keras")\n'
        "{fit}"
    ),
    "save_weights": (
        'model.save_weights(folder / "model.weights.h5")\n'
        "before = model.get_weights()\n"
        'model.load_weights(folder / "model.weights.h5")\n'
        'seen["loaded"] = [\n'
        "    float(np.abs(a - b).max(initial=0.0))\n"
        "    for a, b in zip(before, model.get_weights())\n"
        "]"
    ),
    "saved": (
        "{evaluate}\n"
        'model.save_weights(folder / "saved.weights.h5")\n'
        'model.load_weights(folder / "saved.weights.h5")\n'
        "value = model.evaluate({evaluated})\n"
        'seen["saved"] = abs(value["loss"] - seen["evaluate"]["loss"])'
    ),
    "state": (
        'seen["state"] = [\n'
        "    np.array(variable) for variable in optimizer.variables\n]"
    ),
    "orders": (
        'seen["orders"] = len({{\n'
        "    np.round(model.predict(data, verbose=0), 3).tobytes()\n"
        "    for _ in range(4)\n}})"
    ),
    "count": 'seen["count"] = len(model.predict(data, verbose=0))',
    **{
        f"{name} of its own": (
            f'seen["{name} of its own"] = model.{name}({{own}})'
        )
        for name in ("predict_on_batch", "test_on_batch", "train_on_batch")
    },
    "checkpoint": ('tf.train.Checkpoint(model=model).save(str(folder / "tf"))'),
}
# Actions that must not matter, as one process runs them.
IDEAL = {
    "save, load": "{fit}",
    "checkpoint": "",
}
# The features that can be the theme of a program, with their weights.
THEMES = {
    **{name: 1 for name in FEATURES if name not in ("where", "batch")},
    **{"script": 3, "wrapper": 2, "precision": 2},
    **{"shuffle": 5, "family": 3, "looked at": 2, "custom": 3, "source": 2},
    **{"exclude": 2, "layers": 3, "loss": 2, "optimizer": 3, "actions": 3},
    **{"callbacks": 2, "rest": 2, "scale": 0.7, "held as": 0.4},
    **{"held by": 0.4, "aggregation": 0.4, "accumulate": 2},
}
# The features that the values of a feature depend on.
OF = {"layers": "input", "loss": "task", "metrics": "task"}
STRATEGIES = {
    "one": "tf.distribute.get_strategy()",
    "mirrored": 'tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])',
    "elsewhere": "tf.distribute.get_strategy()",
}
OURS = "tfo.SparseMultiWorkerMirroredStrategy()"
# The largest relative rounding error of float32.
ROUNDING = 2.0**-23


def choose(rng, weights):
    return rng.choices(list(weights), list(weights.values()))[0]


def some_of(rng, values, most, chance=0.5):
    """Draw a list of up to `most` values; each is added with `chance`."""
    count = 0
    while count < most and rng.random() < chance:
        count += 1
    return rng.sample(list(values), min(count, len(values)))


def draw(rng):
    """Return a random program whose features can be combined.

    It has a theme, which is a feature that is not plain. So every feature is
    tried equally often, even if it can be combined with few others.
    """
    while True:
        program = _draw(rng)
        if program["script"] == "conservation" and broken(program) is None:
            return program
        theme = choose(rng, THEMES)
        value = _unlike_plain(program, theme, rng)
        program = changed(program, theme, value)
        program = repaired(program, theme, rng)
        if program is not None:
            return program


def values_of(program, name):
    """Return the values of a feature, or of the elements of its list."""
    values = {
        "layers": BODIES[program["input"]],
        "loss": LOSSES[program["task"]],
        "metrics": METRICS[program["task"]],
        "pipeline": PIPELINE,
        "callbacks": CALLBACKS,
        "actions": ACTIONS,
    }
    return list(values.get(name, FEATURES[name]))


def _unlike_plain(program, name, rng):
    values = values_of(program, name)
    value = rng.choice([v for v in values if v != plainest(name, program)])
    return [value] if isinstance(plainest(name, program), list) else value


def program_of(features):
    """Return a program with some features; all others are plain."""
    program = {"task": features.get("task", "regression")}
    for name in FEATURES:
        program[name] = features.get(name, plainest(name, program))
    return program


def repaired(program, theme, rng):
    """Change features until all can be combined; return None if impossible."""
    for _ in range(60):
        rule = broken(program)
        if rule is None:
            return program
        wrong = [
            name
            for name, limit in rule.allowed.items()
            if not is_allowed(program[name], limit)
        ]
        if rule.name is None:
            names = [n for n in unlike_plain(program) if n != OF.get(theme)]
            fixing = [
                n for n in names if not rule.is_broken(plain(program, [n]))
            ]
            names = [n for n in fixing or names if n != theme]
            if not names:
                return None
            program = plain(program, [rng.choice(names)])
        elif rule.name != theme and (theme in wrong or rng.random() < 0.5):
            program = plain(program, [rule.name])
        else:
            program = allowed(program, wrong, rule, rng)
    return None


def allowed(program, names, rule, rng):
    """Return a program with values that a rule allows."""
    for name in names:
        limit = rule.allowed[name]
        program = plain(program, [name])
        if not is_allowed(program[name], limit):
            values = [v for v in values_of(program, name) if v in limit]
            if values and not isinstance(program[name], list):
                program = changed(program, name, rng.choice(values))
    return program


def unlike_plain(program):
    """Return the features of a program that could be plainer."""
    return [
        name
        for name, value in program.items()
        if name not in ("where", "seeded", "batch")
        and value != plainest(name, program)
    ]


def plain(program, names):
    """Return a program some of whose features are plain."""
    for name in names:
        program = changed(program, name, plainest(name, program))
    return program


def changed(program, name, value):
    """Return a program with another value; dependent features become plain."""
    program = {**program, name: value}
    for other in (other for other, of in OF.items() if of == name):
        program[other] = plainest(other, program)
    return program


def _draw(rng):
    program = {
        name: choose(rng, weights)
        for name, weights in FEATURES.items()
        if weights is not None
    }
    # Most features are plain, since users do not combine many others.
    for name in rng.sample(list(program), len(program) // 3):
        if name not in ("where", "input", "task", "batch", "batches"):
            program[name] = plainest(name)
    if program["script"] == "conservation":
        kept = (*OF_COMPRESSION, "scales", "wrapper", "epochs", "batches")
        kept = ("where", "batch", "script", *kept)
        program["wrapper"] = rng.choice(["none", *COMPARED])
        return program_of({name: program[name] for name in kept})
    if program["script"] == "Keras":
        program = plain(program, OF_LOOPS)
    program = plain(program, ["scales"])
    if not program["optimizer"].startswith("DGC"):
        program = plain(program, OF_COMPRESSION)
    layers = BODIES[program["input"]]
    program["layers"] = some_of(rng, layers, 2, 0.7)
    program["loss"] = rng.choice(list(LOSSES[program["task"]]))
    program["metrics"] = some_of(rng, METRICS[program["task"]], 2)
    program["pipeline"] = some_of(rng, PIPELINE, 2, 0.4)
    program["callbacks"] = some_of(rng, CALLBACKS, 2, 0.35)
    program["actions"] = some_of(rng, ACTIONS, 3, 0.6)
    return {name: program[name] for name in FEATURES}


def plainest(name, program=None):
    """Return the first value of a feature."""
    if name == "loss":
        return next(iter(LOSSES[program["task"]]))
    weights = FEATURES[name]
    return [] if weights is None else next(iter(weights))


def broken(program):
    """Return the first rule that a program breaks, or None."""
    return next((rule for rule in RULES if rule.is_broken(program)), None)


# Rendering.


def indent(text, by=4):
    return textwrap.indent(text, " " * by)


def script(program, ideal=False, nudge=0):
    """Return the script of a program.

    With a `nudge`, data and learning rate have rounding errors, drawn with this
    seed.
    """
    if nudge:
        program = {**program, "nudge": nudge}
    text = script_of(program, ideal)
    # Without our strategy, overlapping is an error.
    return text.replace("overlap=True", "overlap=False") if ideal else text


def script_of(program, ideal):
    if ideal and program["optimizer"] == "ScheduleFreeAdamW":
        # In a graph, it reads a momentum that has already changed. Eagerly, and
        # under any strategy, it reads the earlier one.
        program = {**program, "eagerly": True, "steps_per_execution": 1}
        program["loop"] = "eager"
    if program["script"] == "conservation":
        head = IMPORTS.format(strategy=strategy_of(program, ideal))
        return f"{head}\n\n{conservation_text(program)}\n"
    parts = [
        IMPORTS.format(strategy=strategy_of(program, ideal)),
        "keras.utils.set_random_seed(1)" if program["seeded"] else None,
        OPTIMIZED if program["graphs"] == "optimized" else None,
        precision(program),
        data_text(program),
        *(
            helper_text(program, name, ideal)
            for name in helpers(program, ideal)
        ),
        model_text(program),
        setup_text(program, ideal),
        pipeline_text(program, ideal),
        (
            fit_text(program, ideal)
            if program["script"] == "Keras"
            else f"{loop_text(program, columns(program), ideal)}\n{NOTE}"
        ),
        *(action_text(program, action, ideal) for action in program["actions"]),
        CHECKPOINT if "ModelCheckpoint" in program["callbacks"] else None,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


IMPORTS = """import functools
import json
import os
import pathlib
import types

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tf_optimizers as tfo

strategy = {strategy}
cluster = json.loads(os.environ.get("TF_CONFIG", "{{}}"))
task = cluster.get("task", {{"index": 0}})
folder = pathlib.Path(f"worker-{{task['index']}}")
folder.mkdir(exist_ok=True)
seen = {{}}  # What is compared with one process.


def some(data, rows):
    return tf.nest.map_structure(lambda array: array[:rows], data)"""


OPTIMIZED = """tf.config.optimizer.set_experimental_options(
    {"disable_meta_optimizer": False}
)"""
CHECKPOINT = """model.load_weights(folder / "checkpoint.weights.h5")
seen["weights of a file"] = model.get_weights()"""


def strategy_of(program, ideal):
    return STRATEGIES.get("one" if ideal else program["where"], OURS)


def precision(program):
    policy = program["precision"]
    if policy == "float64":
        return 'keras.config.set_floatx("float64")'
    if policy == "float32":
        return None
    return f'keras.config.set_dtype_policy("{policy}")'


SCALED = {
    "ordinary": "",
    "huge": "x *= 10000",
    "one row": "x[rows // 2] *= 1e6",
    "a scaled row": "x[rows // 2] *= 1e30",
    "enormous": "x *= 1e12",
}


def data_text(program):
    """Return the arrays x, y and, if there are any, w."""
    rows = program["batch"] * program["batches"] + program["rest"]
    lines = [
        "rng = np.random.default_rng(0)",
        f"rows = {rows}",
        SHAPES[program["input"]],
        SCALED[program["scale"]],
        VOCABULARY if program["vocabulary"] == "set" else "",
        TASKS[program["task"]][0],
        nudge_text(program),
    ]
    if program["style"] == "two inputs":
        lines.append(
            'x = {"a": x, "b": rng.standard_normal((rows, 3))'
            '.astype("float32")}'
        )
    if program["style"] == "two outputs":
        lines.append('y = {"one": y, "two": y}')
    if program["weights"] == "sample":
        lines.append('w = rng.uniform(0.5, 2.0, rows).astype("float32")')
    if program["weights"] == "zeros":
        lines.append('w = (np.arange(rows) % 3 > 0).astype("float32")')
    return "\n".join(line for line in lines if line)


def nudge_text(program):
    """Return the text that adds rounding errors to data, if wanted."""
    if "nudge" not in program:
        return ""
    lines = [f"nudges = np.random.default_rng({program['nudge']})"]
    for name, is_real in {
        "x": program["input"] != "tokens",
        "y": program["task"] == "regression",
    }.items():
        if is_real:
            signs = f"nudges.choice([-1, 1], {name}.shape)"
            lines.append(f"{name} *= 1 + {ROUNDING} * {signs}")
    return "\n".join(lines)


# Words, numbered in the order of a set.
VOCABULARY = """words = np.array([f"word {n}" for n in range(9)])[x - (x > 0)]
vocabulary = {word: n for n, word in enumerate(set(words.flat))}
x = np.vectorize(vocabulary.get)(words).astype("int32")"""


def columns(program):
    """Return the names of a batch's parts."""
    has_weights = program["weights"] in ("sample", "zeros")
    return ["x", "y", "w"] if has_weights else ["x", "y"]


def helpers(program, ideal):
    """Return the names of classes and functions that a script defines."""
    used = [
        name
        for name in program["layers"]
        if name in HELPERS and program["family"] == "layers"
    ]
    text = " ".join(
        [
            LOSSES[program["task"]][program["loss"]],
            *(METRICS[program["task"]][name] for name in program["metrics"]),
            WRAPPERS[program["wrapper"]],
            OPTIMIZERS[program["optimizer"]],
        ]
    )
    used += [
        name
        for name in HELPERS
        if re.search(rf"\b{re.escape(name)}\b", text) and name not in used
    ]
    if program["shuffle"] == "random filter":
        used.append("Twice")
    if program["family"] == "layers" and program["custom"] != "none":
        used.append(program["custom"])
    if program["family"] != "layers":
        used.append(program["family"])
    if program["interrupt"] != "none":
        used.append("Interruption")
    if program["source"] == "PyDataset":
        used.append("Batches")
    used += [name for name in program["callbacks"] if name in HELPERS]
    # With one replica, there is no exchange that would sum rows.
    has_sums = program["input"] == "tokens" and program["where"] not in (
        *("1", "elsewhere"),
    )
    if ideal and has_sums:
        used.insert(0, "Embedding of sums")
    return list(dict.fromkeys(used))


FETCHED = {
    "by one": "",
    "threads": "workers=2",
    "processes": "workers=2, use_multiprocessing=True",
}
PERMUTE = {"np.random": "self.order = np.random.permutation(self.order)"}


def helper_text(program, name, ideal):
    """Return the text of a class or function."""
    rows = program["batch"] * program["batches"] + program["rest"]
    found = HELPERS[name]
    if ideal:
        found = IDEAL_OF_OURS.get(name, found)
    if name == program["custom"]:
        more = RETURNED[program["returned"]]
        found = (
            found.replace(
                "return {metric.name: metric.result() "
                "for metric in self.metrics}",
                "return {\n"
                "            **{metric.name: metric.result() "
                "for metric in self.metrics},\n"
                f"            {more},\n        }}",
            )
            if more
            else found
        )
        tests = program["test step"] != "Keras's"
        found = with_draws(found, program["drawn"])
        held = (program[name] for name in ("held by", "held as", "aggregation"))
        found = with_step(with_held(found, *held), program["step"], tests)
    for place, text in {
        "{batch}": program["batch"],
        "{stop}": rows,
        "{columns}": ", ".join(columns(program)),
        "{optimizer}": optimizer_text(program),
        "{fetched}": FETCHED[program["fetched"]],
        "{permute}": PERMUTE.get(program["shuffle"], "pass"),
    }.items():
        found = found.replace(place, str(text))
    return found


def model_text(program):
    """Return the function `make_model`."""
    if program["family"] != "layers":
        body = FAMILIES[program["family"]]
    else:
        body = layers_text(program)
    return "def make_model():\n" + indent(body)


def layer_list(program):
    """Return the expressions of a body's layers."""
    bodies = BODIES[program["input"]]
    names = list(program["layers"])
    if program["input"] == "tokens" and "mbedding" not in "".join(names[:1]):
        names = ["Embedding", *names]
    found = [bodies[name] for name in names]
    if program["vocabulary"] == "set":  # Then the order does not matter.
        old, new = "Embedding(10, 4", 'Embedding(10, 4, "zeros"'
        found = [text.replace(old, new) for text in found]
    if LAST.isdisjoint(names[-1:]) and program["input"] != "vector":
        found.append("layers.Flatten()")
    return found


def head(program, name=""):
    units, activation = TASKS[program["task"]][1:]
    loss = LOSSES[program["task"]][program["loss"]]
    if "from_logits=True" in loss:
        activation = None
    arguments = [str(units)]
    if activation:
        arguments.append(f'activation="{activation}"')
    if program["precision"].startswith("mixed"):
        arguments.append('dtype="float32"')
    if name:
        arguments.append(f'name="{name}"')
    return f"layers.Dense({', '.join(arguments)})"


def layers_text(program):
    body = layer_list(program)
    custom = program["custom"]
    make = custom_class(custom)
    style = program["style"]
    inputs = f"keras.Input({INPUT_SHAPES[program['input']]})"
    penalty = ["Penalty()"] if custom in ADDED else []
    everything = [*body, *penalty, head(program)]
    if style in ("sequential", "lazy"):
        if style == "sequential":
            everything.insert(0, inputs)
        listed = "".join(f"    {layer},\n" for layer in everything)
        if make == "keras.Model":
            return f"return keras.Sequential([\n{listed}])"
        return f"parts = keras.Sequential([\n{listed}])\n" + (
            f"inputs = {inputs}\nreturn {make}(inputs, parts(inputs))"
            if style == "sequential"
            else f"return {make}(parts)"
        )
    if style == "subclassed":
        listed = "".join(f"        {layer},\n" for layer in everything)
        return (
            f"class Mine({make}):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            f"        self.parts = [\n{indent(listed)}        ]\n\n"
            "    def call(self, x, training=False):\n"
            "        for part in self.parts:\n"
            "            x = part(x)\n"
            "        return x\n\n"
            "return Mine()"
        )
    return graph_text(program, body, inputs, make)


INPUT_SHAPES = {
    "vector": "(6,)",
    "image": "(6, 6, 2)",
    "series": "(6, 4)",
    "tokens": '(6,), dtype="int32"',
}


def graph_text(program, body, inputs, make):
    """Return a functional model."""
    style, custom = program["style"], program["custom"]
    lines = [f"inputs = {inputs}"]
    if style == "nested":
        listed = ", ".join(body) or 'layers.Dense(4, name="inner")'
        lines.append(f"inner = keras.Sequential([{listed}])")
        lines.append("h = inner(inputs)")
    elif style == "twins":
        listed = ", ".join([*body, "layers.Dense(4)"])
        lines.append(f"tower = keras.Sequential([{listed}])")
        lines.append(
            "h = layers.Concatenate()([tower(inputs), tower(-inputs)])"
        )
    else:
        lines.append("h = inputs")
        lines += [f"h = {layer}(h)" for layer in body]
    if custom in ADDED:
        lines.append("h = Penalty()(h)")
    if style == "two inputs":
        shape = INPUT_SHAPES[program["input"]]
        lines[0] = f'inputs = keras.Input({shape}, name="a")'
        lines.append('more = keras.Input((3,), name="b")')
        lines.append("h = layers.Concatenate()([h, layers.Dense(3)(more)])")
        lines.append(f"outputs = {head(program)}(h)")
        lines.append(f'return {make}({{"a": inputs, "b": more}}, outputs)')
    elif style == "two outputs":
        lines.append(
            f'outputs = {{"one": {head(program, "one")}(h), '
            f'"two": {head(program, "two")}(h)}}'
        )
        lines.append(f"return {make}(inputs, outputs)")
    else:
        lines.append(f"outputs = {head(program)}(h)")
        lines.append(f"return {make}(inputs, outputs)")
    return "\n".join(lines)


def custom_class(custom):
    return "keras.Model" if custom in ("none", *ADDED) else "Custom"


def is_rateless(program):
    """Return whether weights do not change, so that order cannot matter."""
    return program["shuffle"] in SHUFFLED or any(
        program[name] == value for name, value in RATELESS.items()
    )


def optimizer_text(program):
    """Return the expression of an optimizer."""
    # Sums over rows would diverge, and magnify rounding errors.
    rate = "0.01" if program["loss"] in SUMS else "0.1"
    if "nudge" in program:
        rate += f" * (1 + {2 * ROUNDING})"
    if program["rate"] == "schedule":
        rate = f"keras.optimizers.schedules.ExponentialDecay({rate}, 3, 0.7)"
    rate = "0.0" if is_rateless(program) else rate
    arguments, inner = [], []
    if program["average"] != "none":
        arguments.append("use_ema=True")
        arguments.append("ema_momentum=0.8")
    if program["average"] == "ema overwrites":
        arguments.append("ema_overwrite_frequency=2")
    if program["accumulate"] > 1:
        arguments.append(f"gradient_accumulation_steps={program['accumulate']}")
    if program["clip"] != "none":
        inner.append(f"{program['clip']}=0.2")
    if program["optimizer"].startswith("DGC") and program["wire"] != "float32":
        inner.append(f'value_dtype="{program["wire"]}"')
    wrapper = WRAPPERS[program["wrapper"]]
    if program["wrapper"] in ("none", "ShardedState"):
        inner += arguments
        arguments = []
    text = OPTIMIZERS[program["optimizer"]].format(
        rate=rate, more="".join(f", {argument}" for argument in inner)
    )
    more = "".join(f", {argument}" for argument in arguments)
    return wrapper.format(inner=text, more=more)


def setup_text(program, ideal=False):
    """Return the text that creates and compiles the model."""
    optimizer = f"optimizer = {optimizer_text(program)}"
    if program["exclude"] == "list":
        optimizer += (
            "\noptimizer.exclude_from_weight_decay("
            "var_list=[model.trainable_variables[0]])"
        )
    if program["exclude"] == "names":
        optimizer += '\noptimizer.exclude_from_weight_decay(var_names=["bias"])'
    lines = []
    if program["another model"] != "none":
        other = "keras.Sequential([keras.Input((3,)), layers.Dense(2)])"
        if program["another model"] == "on the chief":
            other = f'if task["index"] == 0:\n    {other}'
        lines.append(other)
    if program["made"] == "optimizer outside":
        lines.append(optimizer)
    if program["exchange"] != "any":
        lines.append(exchange_text(program))
    inside = ["model = make_model()"]
    if program["step"] in JOINED:
        inside.append(JOINED[program["step"]])
    if program["frozen"] == "first":
        inside.append("model.layers[0].trainable = False")
    if not program["seeded"]:
        inside.append("model.set_weights([\n")
        inside[-1] += (
            "    rng.uniform(-0.5, 0.5, weight.shape)\n"
            "    for weight in model.get_weights()\n])"
        )
    if program["made"] in ("inside", "build outside"):
        inside.append(optimizer)
    if program["script"] == "loop":
        if program["built"] == "at once":
            inside.append("optimizer.build(model.trainable_weights)")
    elif program["made"] != "compile outside":
        inside.append(compile_text(program))
    scope = "strategy.scope()"
    if program["where"] == "elsewhere" and not ideal:
        scope = 'tf.device("CPU:1")'
    lines.append(f"with {scope}:\n" + indent("\n".join(inside)))
    if program["made"] == "build outside":
        shape = INPUT_SHAPES[program["input"]].split(")")[0].strip("(), ")
        lines.append(f"model.build((None, {shape}))")
    if program["made"] == "compile outside":
        lines += [optimizer, compile_text(program)]
    lines.append(
        'if model.built:\n    seen.setdefault("start", model.get_weights())'
    )
    return "\n".join(lines)


def compile_text(program):
    """Return the call of `compile`."""
    if program["family"] in ("gan", "parts"):
        arguments = []
    else:
        arguments = ["optimizer"]
        arguments.append(losses_text(program))
    found = [METRICS[program["task"]][name] for name in program["metrics"]]
    if program["shuffle"] == "random filter":
        found.append("Twice()")
    if program["shuffle"] == "two":
        found.append(
            "keras.metrics.MeanMetricWrapper("
            'lambda y, _: y[:, 0], name="share")'
        )
    if found and program["style"] == "two outputs":
        arguments.append(f'metrics={{"two": [{", ".join(found)}]}}')
    elif found:
        kind = "metrics"
        if program["weights"] in ("sample", "zeros"):
            kind = "weighted_metrics"
        arguments.append(f"{kind}=[{', '.join(found)}]")
    if program["eagerly"]:
        arguments.append("run_eagerly=True")
    if program["steps_per_execution"] > 1:
        arguments.append(
            f"steps_per_execution={program['steps_per_execution']}"
        )
    inner = "".join(f"    {argument},\n" for argument in arguments)
    return f"model.compile(\n{inner})"


def losses_text(program):
    loss = LOSSES[program["task"]][program["loss"]]
    if program["style"] == "two outputs":
        return (
            f'loss={{"one": {loss}, "two": {loss}}}, '
            'loss_weights={"one": 1.0, "two": 0.5}'
        )
    return f"loss={loss}"


# Data.


def pipeline_text(program, ideal):
    """Return the text that makes `data`, if it is needed."""
    text = data_pipeline(program, ideal)
    if program["branches"] == "data":
        text = in_branches(text)
    if program["distributed"]:
        text += "\nshared = strategy.experimental_distribute_dataset(data)"
    return text


def in_branches(text):
    """Put a text on different lines for the first worker and others."""
    return f'if task["index"] == 0:\n{indent(text)}\nelse:\n{indent(text)}'


def data_pipeline(program, ideal):
    source, names = program["source"], columns(program)
    joined = ", ".join(names)
    if source == "arrays":
        return None
    if source == "generator":
        return GENERATOR.format(columns=joined, batch=program["batch"])
    if source == "from_generator":
        text = FROM_GENERATOR.format(columns=joined, batch=program["batch"])
        return text + (counted(program) if ideal else "")
    if source == "PyDataset":
        return "data = Batches()" + looked_at(program)
    lines = []
    if source == "TFRecords":
        lines.append(TFRECORDS.format(columns=joined))
    elif source == "text":
        lines.append(TEXT.format(columns=joined))
    elif program["shuffle"] == "before":
        lines.append("order = tf.random.shuffle(tf.range(rows))")
        gathered = ", ".join(f"tf.gather({name}, order)" for name in names)
        lines.append(f"data = tf.data.Dataset.from_tensor_slices(({gathered}))")
    else:
        lines.append(f"data = tf.data.Dataset.from_tensor_slices(({joined}))")
    lines += [PIPELINE[name] for name in program["pipeline"]]
    lines += SHUFFLES[program["shuffle"]]
    rest = ", drop_remainder=True"
    rest = rest if "drop_remainder" in program["pipeline"] else ""
    lines.append(f"data = data.batch({program['batch']}{rest})")
    if program["emptied"] != "none":
        lines.append(emptied(program))
    if program["policy"] == "FILE":
        lines.append(POLICY)
    if program["shuffle"] == "in map":
        lines.append(IN_MAP.format(batch=program["batch"]))
    # If Keras tries to draw one more row, the order of the next epoch changes.
    is_counted = ideal or program["shuffle"] == "seeded"
    # Without our strategy, it counts one more step, as one process does.
    is_counted |= program["where"] == "elsewhere"
    if is_counted and program["shuffle"] != "random filter":
        lines.append(counted(program))
    if program["steps"] == "repeat":
        lines.append("data = data.repeat()")
    return "\n".join(line for line in lines if line) + looked_at(program)


POLICY = """options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.FILE
)
data = data.with_options(options)"""


def emptied(program):
    """Return the text that removes all rows of a batch, or the batch."""
    last = program["batches"] - 1 + (program["rest"] > 0)
    number = {"first": 0, "second": 1, "last": last, "filter": 1}
    number = number[program["emptied"]]
    if program["emptied"] == "filter":
        return (
            "data = data.enumerate().filter("
            f"lambda n, _: n != {number}).map(lambda _, row: row)"
        )
    return (
        "data = data.enumerate().map(lambda n, row: tf.nest.map_structure(\n"
        f"    lambda part: part[: tf.where(n == {number}, 0, "
        "tf.shape(part)[0])], row\n))"
    )


def counted(program):
    """Return text that sets the length, for Keras to count steps."""
    batches, rest = program["batches"], program["rest"] > 0
    if "drop_remainder" in program["pipeline"]:
        rest = 0
    rows = program["batch"] * batches + program["rest"]
    count = rows // program["batch"] + (rest and rows % program["batch"] > 0)
    count -= program["emptied"] == "filter"
    return (
        "\ndata = data.apply("
        f"tf.data.experimental.assert_cardinality({int(count)}))"
    )


SHUFFLES = {
    "none": [],
    "shuffle": ["data = data.shuffle(rows)"],
    "seeded": ["data = data.shuffle(rows, seed=3)"],
    "before": [],
    "in map": [],
    "in flat_map": [
        "data = data.batch(rows).flat_map(\n"
        "    lambda *whole: tf.data.Dataset.from_tensor_slices(\n"
        "        (tf.random.shuffle(tf.range(tf.shape(whole[0])[0])), *whole)\n"
        "    ).map(lambda number, *row: tuple(\n"
        "        tf.gather(part, number) for part in whole\n"
        "    ))\n"
        ")"
    ],
    "in interleave": [
        "data = tf.data.Dataset.range(2).interleave(\n"
        "    lambda part: data.shard(2, part).shuffle(rows), 2\n"
        ")"
    ],
    "in files": [
        "data = tf.data.Dataset.range(2).flat_map(\n"
        "    lambda part: data.shard(2, part).shuffle(rows)\n"
        ")"
    ],
    "random filter": [
        "data = data.filter(lambda *row: tf.random.uniform([]) < 0.6)"
    ],
    "two": [
        "data = tf.data.Dataset.zip(\n"
        "    data.shuffle(rows), data.shuffle(rows)\n"
        ").map(\n"
        "    lambda one, two: (one[0], tf.cast(\n"
        "        tf.reduce_all(one[1] == two[1]), one[1].dtype\n"
        "    ) * tf.ones_like(one[1]))\n"
        ")"
    ],
}
IN_MAP = """numbers = tf.data.Dataset.from_tensors(tf.range(rows)).map(
    tf.random.shuffle
).unbatch()
data = data.unbatch().batch(rows)
data = tf.data.Dataset.zip(data, numbers.batch(rows)).map(
    lambda whole, order: tf.nest.map_structure(
        lambda part: tf.gather(part, order), whole
    )
).unbatch().batch({batch})"""
GENERATOR = """def batches():
    while True:
        for start in range(0, rows, {batch}):
            yield tuple(part[start : start + {batch}] for part in ({columns}))


data = batches()"""
FROM_GENERATOR = """def read():
    for row in zip({columns}):
        yield row


data = tf.data.Dataset.from_generator(
    read,
    output_signature=tuple(
        tf.TensorSpec(part.shape[1:], part.dtype) for part in ({columns},)
    ),
).batch({batch})"""
PARSE = """


def parse(entry):
    row = {read}
    found, start = [], 0
    for part in ({columns}):
        size = int(np.prod(part.shape[1:]))
        found.append(tf.cast(
            tf.reshape(row[start : start + size], part.shape[1:]), part.dtype
        ))
        start += size
    return tuple(found)


"""
TFRECORDS = (
    """names = []
for number in range(2):
    names.append(str(folder / f"{{number}}.tfrecord"))
    with tf.io.TFRecordWriter(names[-1]) as file:
        for row in list(zip({columns}))[number * (rows // 3) :][
            : rows if number else rows // 3
        ]:
            file.write(tf.io.serialize_tensor(
                tf.concat([
                    tf.reshape(tf.cast(part, "float32"), [-1]) for part in row
                ], 0)
            ).numpy())"""
    + PARSE.replace("{read}", 'tf.io.parse_tensor(entry, "float32")')
    + "data = tf.data.TFRecordDataset(names).map(parse)"
)
TEXT = (
    """(folder / "rows.csv").write_text("".join(
    ",".join(repr(float(v)) for part in row for v in np.ravel(part)) + "\\n"
    for row in zip({columns})
))"""
    + PARSE.replace(
        "{read}", 'tf.strings.to_number(tf.strings.split(entry, ","))'
    )
    + 'data = tf.data.TextLineDataset(str(folder / "rows.csv")).map(parse)'
)


def looked_at(program):
    """Return the text that looks at the first batch."""
    if program["looked at"] == "not":
        return ""
    look = "first = next(iter(data))"
    if program["source"] == "PyDataset":
        look = "first = data[np.random.randint(len(data))]"
    if program["looked at"] == "by all":
        return "\n" + look
    return f'\nif task["index"] == 0:\n    {look}'


# Actions.


def arguments_of(program):
    """Return the arguments that name the data."""
    names, source = columns(program), program["source"]
    if source != "arrays":
        return ["data"]
    found = ["x", "y"]
    if len(names) == 3:
        found.append("sample_weight=w")
    return [*found, f"batch_size={program['batch']}"]


def fit_call(program, extra=()):
    arguments = arguments_of(program)
    if program["distributed"]:
        arguments = ["shared"]
    arguments.append(f"epochs={program['epochs']}")
    if program["source"] == "arrays":
        is_on = program["shuffle"] == "shuffle"
        arguments += [] if is_on else ["shuffle=False"]
    if program["source"] == "PyDataset":
        is_on = program["shuffle"] == "shuffle"
        arguments += ["shuffle=True"] if is_on else ["shuffle=False"]
    if program["source"] == "generator" or program["steps"] == "repeat":
        steps = program["batches"]
        if program["steps"] != "repeat":
            steps += program["rest"] > 0
        arguments.append(f"steps_per_epoch={steps}")
    elif program["steps"] == "fewer":
        arguments.append(f"steps_per_epoch={program['batches'] - 1}")
    if program["weights"] == "class":
        arguments.append("class_weight={0: 1.0, 1: 2.0, 2: 0.5}")
    if program["validation"] == "split":
        arguments.append("validation_split=0.3")
    if program["validation"] == "data":
        arguments.append("validation_data=(some(x, 7), some(y, 7))")
    if program["validation"] == "generator":
        arguments += ["validation_data=batches()", "validation_steps=2"]
    callbacks = [CALLBACKS[name] for name in program["callbacks"]]
    callbacks += extra
    # Averages are swapped in after the backup, as its page says.
    callbacks.sort(key=lambda text: "SwapEMAWeights" in text)
    if callbacks:
        inner = "".join(f"        {callback},\n" for callback in callbacks)
        arguments.append(f"callbacks=[\n{inner}    ]")
    arguments.append("verbose=0")
    inner = "".join(f"    {argument},\n" for argument in arguments)
    return f"model.fit(\n{inner})"


NOTE = 'seen[f"weights {len(seen)}"] = model.get_weights()'


FINITE = """
seen["is finite"] = all(
    bool(np.all(np.isfinite(weight))) for weight in model.get_weights()
)"""


HELD = """
held_values = strategy.experimental_local_results({name})
seen["held"] = np.array(held_values[0])
seen["is common"] = len({{float(value) for value in held_values}}) == 1"""


def noted_fit(program):
    call = f"history = {fit_call(program)}"
    if program["branches"] == "fit":
        call = in_branches(call)
    more = FINITE if program["scale"] == "enormous" else ""
    if program["custom"] == "own average":
        more += '\nseen["average"] = np.array(model.average)'
    if program["held by"] != "nobody":
        _, name = HOLDERS[program["held by"]]
        name += ".value" * (program["held as"] == "keras.Variable")
        more += HELD.format(name=name)
    if program["loss"] == "by hand: moving":
        more += '\nseen["goal"] = goal.numpy()'
    return f'{call}\nseen[f"fit {{len(seen)}}"] = history.history\n{NOTE}{more}'


def fit_text(program, ideal):
    """Return the first `fit`, which may be interrupted."""
    if program["interrupt"] == "none":
        return noted_fit(program)
    if ideal:
        return fit_call(program) + "\n" + NOTE
    freq = '"epoch"' if program["interrupt"] == "epoch" else "1"
    backup = f'tfo.callbacks.BackupAndRestore("backup", save_freq={freq})'
    interrupted = fit_call(program, [backup, "Interruption()"])
    return (
        f"try:\n{indent(interrupted)}\n"
        "except InterruptedError:\n"
        "    pass\n"
        "keras.utils.set_random_seed(2)\n"
        + setup_text(program, ideal)
        + "\n"
        + fit_call(program, [backup])
        + "\n"
        + NOTE
    )


def action_text(program, action, ideal):
    template = ACTIONS[action]
    if ideal:
        template = IDEAL.get(action, template)
    return template.format(
        evaluate=evaluate_text(program),
        evaluated=evaluated(program),
        own=own_batch(program, action),
        predict=predict_text(program),
        fit=noted_fit(program),
        others=others_text(program, action.removeprefix("fit "), ideal),
        note=NOTE,
        compile=scoped_compile(program),
    )


def others_text(program, kind, ideal):
    """Return a `fit`, and an `evaluate`, on data of another kind."""
    if ideal and kind == "a dataset without length":
        # At its end, Keras makes a step without a batch, in which layers such
        # as `SpectralNormalization` assign state.
        kind = "a dataset"
    if kind not in KINDS:
        return ""
    names = columns(program)
    text = KINDS[kind].format(columns=", ".join(names), batch=program["batch"])
    data = {"a PyDataset": "Others()", "a generator": "others()"}
    arguments = data.get(kind, "others")
    if kind == "arrays":
        arguments = f"x, y, batch_size={program['batch']}"
        arguments += ", sample_weight=w" * (len(names) == 3)
    text += (
        f"history = model.fit({arguments}, shuffle=False, verbose=0)\n"
        'seen[f"fit {len(seen)}"] = history.history\n'
    )
    if program["custom"] not in OWN_METRICS:
        text += (
            'seen[f"fit {len(seen)} evaluate"] = model.evaluate(\n'
            f"    {arguments}, return_dict=True, verbose=0\n)\n"
        )
    return text + NOTE


def scoped_compile(program):
    lines = [
        f"optimizer = {optimizer_text(program)}",
        compile_text(program),
    ]
    return "with strategy.scope():\n" + indent("\n".join(lines))


def own_batch(program, action):
    """Return the arguments of a batch that differs between workers."""
    parts = "(x,)" if action.startswith("predict") else "(x, y)"
    return (
        "*tf.nest.map_structure(\n"
        '    lambda part: part + part.dtype.type(task["index"]), '
        f"some({parts}, 4)\n)"
    )


def evaluate_text(program):
    return f'seen["evaluate"] = model.evaluate({evaluated(program)})'


def evaluated(program):
    arguments = arguments_of(program)
    if program["source"] in ("generator",) or program["steps"] == "repeat":
        arguments.append(f"steps={program['batches']}")
    arguments += ["return_dict=True", "verbose=0"]
    return ", ".join(arguments)


def predict_text(program):
    has_order = program["shuffle"] in ("none", "seeded")
    if (
        program["source"] in ("tf.data", *FILES)
        and has_order
        and program["steps"] != "repeat"
    ):
        return 'seen["predict"] = model.predict(data, verbose=0)'
    return (
        'seen["predict"] = model.predict('
        f"x, batch_size={program['batch']}, verbose=0)"
    )
