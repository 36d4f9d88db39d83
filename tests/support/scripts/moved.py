"""Runs the code of docs/horovod.md, and the custom loop, on a worker."""

import ast
import os
import pathlib
import re

import keras
import numpy as np
import tensorflow as tf

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "horovod.md"
LOOP = PAGE.with_name("strategy.md")
COMMAND = "python -m tf_optimizers.launch "


def rows(text=None):
    """Yield (names in the first column, code, reason) of a text's tables.

    The default text is the page.
    """
    for line in (text or PAGE.read_text()).splitlines():
        if line.startswith("| ") and line.count("|") == 4:
            first, code, reason = (
                cell.strip() for cell in line.split("|")[1:4]
            )
            if names := re.findall("`(.+?)`", first):
                yield names, code.strip("`"), reason


def blocks():
    """Return the whole script, and the custom loop of docs/strategy.md."""
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    loop = LOOP.read_text().split("## A custom loop\n")[1]
    return script, re.search(r"```python\n(.*?)```", loop, re.S)[1]


# By the code of a row: an expression, in which `result` is the code's value,
# and the expression's expected value on both workers, or a list with one each.
STEPS = "trained(result)"
EFFECTS = {
    "strategy = tfo.SparseMultiWorkerMirroredStrategy()": (
        "strategy.num_replicas_in_sync",
        2,
    ),
    "strategy.extended.worker_index": ("result", [0, 1]),
    "strategy.num_replicas_in_sync": ("result", 2),
    "tfo.SparseLoCo.for_steps(1000, keras.optimizers.Adam(0.001))": (
        "[result.value_dtype, *trained(result)]",
        ["int4", 4, True],
    ),
    "keras.optimizers.Adam(0.001)": (STEPS, [4, True]),
    "keras.optimizers.Adam(0.001, gradient_accumulation_steps=4)": (
        STEPS,
        [1, True],
    ),
    "keras.optimizers.AdamW(0.001, gradient_accumulation_steps=4)": (
        STEPS,
        [1, True],
    ),
    "keras.optimizers.SGD(0.1)": (STEPS, [4, True]),
    "keras.optimizers.SGD(0.1 * strategy.num_replicas_in_sync)": (
        "round(float(result.learning_rate), 6)",
        0.2,
    ),
    "tfo.Lamb(0.01)": (STEPS, [4, True]),
    "tfo.SparseLoCo.for_steps(1000, keras.optimizers.AdamW(0.001))": (
        STEPS,
        [4, True],
    ),
    "tfo.SparseLoCo.for_steps("
    "1000, keras.optimizers.Adam(0.001), rampup_begin_step=100)": (
        "[result.rampup_begin_step, result.rampup_step > 1, *trained(result)]",
        [100, True, 4, True],
    ),
    "tfo.SparseLoCo.for_steps("
    "1000, keras.optimizers.AdamW(0.001), sync_every=8)": (
        "[result.sync_every, *trained(result)]",
        [8, 4, True],
    ),
    # Later rows need the policy of the start.
    'keras.config.set_dtype_policy("mixed_bfloat16")': (
        "[keras.config.dtype_policy().name, "
        'keras.config.set_dtype_policy("float32")]',
        ["mixed_bfloat16", None],
    ),
    "tfo.schedules.LansSchedule("
    "0.001, warmup_steps=100, constant_steps=0, decay_steps=900)": (
        "[round(float(result(step)), 6) for step in (49, 99, 999)]",
        [0.0005, 0.001, 0.0],
    ),
    "tfo.ShardedState(keras.optimizers.AdamW(0.001))": (STEPS, [4, True]),
    "tfo.ShardedState(keras.optimizers.AdamW(0.001, global_clipnorm=1.0))": (
        STEPS,
        [4, True],
    ),
    "tfo.ShardedState(tfo.AdamOffload(0.001))": (STEPS, [4, True]),
    "tf.distribute.experimental.CommunicationOptions(bytes_per_pack=2**26)": (
        "tfo.SparseMultiWorkerMirroredStrategy("
        "communication_options=result).num_replicas_in_sync",
        2,
    ),
    'tf.distribute.experimental.CommunicationOptions(implementation="NCCL")': (
        "result.implementation.name",
        "NCCL",
    ),
    "strategy.run(train_step, next(batches))": (
        "changed(space_of_loop['model'])",
        True,
    ),
    "strategy.run(lambda: tf.distribute.get_replica_context()"
    '.all_reduce("MEAN", value))': ("float(result)", 0.5),
    "strategy.run(lambda: tf.distribute.get_replica_context()"
    ".all_gather(rows, axis=0))": (
        "result.numpy().tolist()",
        [0.0, 1.0],
    ),
    "with strategy.scope(): variable = tf.Variable(value)": (
        "float(variable)",
        0.0,
    ),
    "keras.optimizers.schedules.CosineDecay(0.001, 1, alpha=1.0, "
    "warmup_target=0.001 * size, warmup_steps=100)": (
        "[round(float(result(step)), 6) for step in (0, 50, 100, 900)]",
        [0.001, 0.0015, 0.002, 0.002],
    ),
    "keras.callbacks.LearningRateScheduler("
    "lambda epoch, rate: rate / 10 if epoch == 2 else rate)": (
        "fitted(result)[1]",
        [0.1, 0.1, 0.01],
    ),
    'keras.callbacks.ModelCheckpoint(f"worker-{rank}.keras", '
    'monitor="loss", save_best_only=True)': (
        "[fitted(result)[0], sorted(files('*.keras'))]",
        [True, ["worker-0.keras", "worker-1.keras"]],
    ),
    "with strategy.scope(): model = "
    'keras.saving.load_model(f"worker-{rank}.keras")': (
        "model.predict(x[:64], verbose=0).shape[0]",
        64,
    ),
    "keras.layers.BatchNormalization(synchronized=True)": (
        "result.get_config()['synchronized']",
        True,
    ),
    'tfo.callbacks.BackupAndRestore("backup", save_freq=10)': (
        "fitted(result)[0]",
        True,
    ),
    'tfo.callbacks.BackupAndRestore("backup")': ("fitted(result)[0]", True),
    'keras.callbacks.TensorBoard("logs", profile_batch=(10, 20))': (
        "fitted(result)[0] and bool(files('logs/*/*'))",
        True,
    ),
    "model.fit(x, y, batch_size=32 * size, verbose=0)": (
        "[result.params['steps'], result.history['loss'][0] > 0]",
        [16, True],
    ),
}

# Code of rows that trains even in quick tests; the last row writes files.
FEW = (
    "keras.optimizers.Adam(0.001, gradient_accumulation_steps=4)",
    'keras.callbacks.ModelCheckpoint(f"worker-{rank}.keras", '
    'monitor="loss", save_best_only=True)',
)


def run(code, space):
    """Run statements; return the value of the last, if it has one."""
    *statements, last = ast.parse(code).body
    is_value = isinstance(last, ast.Expr)
    before = ast.Module(statements + [last] * (not is_value), [])
    exec(compile(before, "docs", "exec"), space)
    if is_value:
        expression = ast.Expression(last.value)
        return eval(compile(expression, "docs", "eval"), space)


def tools(space):
    """Return the functions that `EFFECTS` calls, mostly small trainings."""
    strategy, x, y = (space[name] for name in ("strategy", "x", "y"))

    def made(optimizer):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((32,)), keras.layers.Dense(1)]
            )
        model.compile(optimizer, "mse")
        return model

    def trained(optimizer):
        """Return the number of steps, and whether they changed weights."""
        model = made(optimizer)
        start = model.get_weights()
        model.fit(x[:256], y[:256], batch_size=64, verbose=0)
        moved = [
            bool((a != b).any())
            for a, b in zip(start, model.get_weights(), strict=True)
        ]
        return [int(optimizer.iterations), any(moved)]

    def fitted(callback):
        """Train with a callback; return whether the loss falls, and rates."""
        model = made(keras.optimizers.SGD(0.1))
        history = model.fit(
            x, y, batch_size=64, epochs=3, callbacks=[callback], verbose=0
        ).history
        rates = [round(rate, 6) for rate in history.get("learning_rate", [])]
        return history["loss"][-1] < history["loss"][0], rates

    def files(pattern):
        return [str(path) for path in pathlib.Path().glob(pattern)]

    return {
        "trained": trained,
        "fitted": fitted,
        "files": files,
        "changed": lambda model: bool(model.get_weights()[0].any()),
    }


def is_long(code):
    """Return whether a row trains a model that only long tests train."""
    effect, _ = EFFECTS[code]
    trains = "trained(" in effect or "fitted(" in effect
    return trains and code not in FEW


def moved(every=False):
    """Return the weights after the page's scripts, and the effects of rows.

    Files are written to the test's folder.

    Args:
        every: Whether to run all rows, or only the quick ones.
    """
    folder = pathlib.Path.cwd()
    os.chdir(os.environ.get("FOLDER", "."))
    try:
        return effects(*blocks(), every)
    finally:
        os.chdir(folder)


def effects(script, loop, every):
    """Run both scripts, then each row with a copy of the scripts' names."""
    keras.utils.set_random_seed(0)
    exec(script, space := {})
    keras.utils.set_random_seed(0)
    exec(loop, space_of_loop := {})
    result = {
        "weights": [w.tolist() for w in space["model"].get_weights()],
        "loop": [w.tolist() for w in space_of_loop["model"].get_weights()],
        "loss": float(space_of_loop["loss"]),
        "effects": {},
    }
    space |= tools(space) | {
        "np": np,
        "tf": tf,
        "space_of_loop": space_of_loop,
        "train_step": space_of_loop["train_step"],
        "strategy": space_of_loop["strategy"],
        "batches": iter(
            space_of_loop["strategy"].experimental_distribute_dataset(
                space_of_loop["data"]
            )
        ),
        "value": tf.constant(float(space["rank"])),
        "rows": tf.constant([float(space["rank"])]),
    }
    for _, code, _ in rows():
        if code not in EFFECTS or code in result["effects"]:
            continue
        if every or not is_long(code):
            scope = dict(space)
            scope["result"] = run(code, scope)
            effect, _ = EFFECTS[code]
            result["effects"][code] = eval(effect, scope)
    return result


def in_one_process():
    """Return weights and last loss of the loop without workers, by NumPy."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(1)])
    kernel, bias = model.get_weights()
    x = np.ones((64, 32))
    for _ in range(4):
        errors = x @ kernel + bias
        gradients = 2 * errors / len(x)
        kernel -= 0.01 * x.T @ gradients
        bias -= 0.01 * gradients.sum(0)
    return (kernel, bias), (errors**2).mean()


def check(results, part, codes):
    """Check that rows have the expected effects on both workers."""
    for worker, result in enumerate(results):
        found = result[part]["effects"]
        assert set(found) == codes
        for code in codes:
            effect, expected = EFFECTS[code]
            by_worker = effect == "result" and isinstance(expected, list)
            value = expected[worker] if by_worker else expected
            assert found[code] == value, code
