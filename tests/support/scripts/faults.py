"""Workers that differ or fail: `faults.py CASE...`.

The last case ends the process; the errors of the other cases are reported.
"""

import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from real_workers import report

import tf_optimizers as tfo

CASES = sys.argv[1:]
# The fault is on the second worker.
IS_WRONG = '"index": 1' in os.environ["TF_CONFIG"]
FOLDER = pathlib.Path(os.environ["FOLDER"])
X, Y = np.random.default_rng(0).random((2, 64, 8)).astype("float32")


def save_alone(model):
    """Try all ways to save a model on one worker; each must fail."""
    model.distribute_strategy.agreement_seconds = 2.0
    ways = {
        "save": lambda: model.save(FOLDER / "model.keras"),
        "save_weights": lambda: model.save_weights(FOLDER / "w.weights.h5"),
        "checkpoint": lambda: tf.train.Checkpoint(model).write(FOLDER / "c"),
    }
    for name, save in ways.items():
        try:
            save()
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
    raise RuntimeError("nothing could be saved")


class Misbehave(keras.callbacks.Callback):
    """Dies, stalls, resets or saves in the middle of an epoch."""

    def __init__(self, case):
        super().__init__()
        self.case = case

    def on_train_batch_end(self, batch, logs=None):
        if batch != 3:
            return
        if IS_WRONG and self.case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if IS_WRONG and self.case == "silent":
            time.sleep(1000)
        if IS_WRONG and self.case == "resets alone":
            self.model.reset_metrics()
        if IS_WRONG and self.case == "sharded, counts alone":
            self.model.optimizer.iterations.assign(0)
        # Like a script that saves only on the chief.
        if not IS_WRONG and self.case == "saves alone":
            save_alone(self.model)


class ReturnsArray(keras.Sequential):
    """Returns an array with an element for each row."""

    def train_step(self, data):
        return super().train_step(data) | {"sums": tf.reduce_sum(data[0], 1)}


def local_steps(strategy, case):
    """Train in rounds of eight steps, with a fault on one worker."""
    case, *options = case.split(", ")
    masks = [keras.layers.Reshape((2, 4)), keras.layers.Masking()]
    masks = masks if "mask" in options else []
    kind = ReturnsArray if "array" in options else keras.Sequential
    with strategy.scope():
        model = kind(
            [
                keras.Input((8,)),
                *masks,
                keras.layers.Dense(4 if masks else 8),
            ]
        )
        optimizer = tfo.SparseLoCo(
            *(keras.optimizers.Adam(), 8),
            min_compress_size=1,
            overlap="overlap" in options,
        )
        model.compile(
            *(optimizer, "mse"),
            run_eagerly="eagerly" in options,
            steps_per_execution=2 if "several a call" in options else 1,
        )
        optimizer.build(model.trainable_variables)
    if IS_WRONG and case == "killed":
        # This worker's entries are never sent.
        optimizer._overlapped._call._function = lambda _: os.kill(
            os.getpid(), signal.SIGKILL
        )
    rows = np.tile(X, (4, 1))
    targets = rows[:, ::-1].copy()
    if IS_WRONG and case == "other rows":
        targets[80:] += 1  # From the eleventh of 32 batches on.
    if masks:
        targets = targets.reshape(-1, 2, 4)
    # After a different number of steps of a call than the round ends.
    last = 88 if IS_WRONG and case == "ends early" else len(rows)
    data = tf.data.Dataset.from_tensor_slices((rows, targets)).batch(8)
    # Makes the number of batches unknown.
    data = data.take(last // 8).filter(lambda x, y: True)
    calls = {
        "read": lambda batch, logs: model.get_metrics_result(),
        # The second worker has no data after eleven batches.
        "synchronize": lambda batch, logs: (
            batch == 11 and optimizer.synchronize()
        ),
    }
    callbacks = [
        keras.callbacks.LambdaCallback(on_train_batch_end=calls[option])
        for option in options
        if option in calls
    ]
    model.fit(data, verbose=0, callbacks=callbacks)
    print("trained to the end")


class SetRate(keras.callbacks.Callback):
    """Sets the learning rate on one worker, after some batches of an epoch."""

    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def on_train_batch_end(self, batch, logs=None):
        if IS_WRONG and batch in self.rates:
            self.model.optimizer.learning_rate = self.rates[batch]


def fit(model, callback):
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])


def part(model):
    """Let the workers' learning rates differ, and then their weights."""
    try:
        fit(model, SetRate({7: 0.2}))
    except RuntimeError as error:
        print(f"rate: {error}", flush=True)
    model.optimizer.learning_rate = 0.1
    fit(model, SetRate({3: 0.2, 4: 0.1}))


def step_late(strategy, optimizer, variables):
    """Let the second worker start its first step after the first has left."""
    gone = FOLDER / "gone"
    while IS_WRONG and not gone.exists():
        time.sleep(0.1)
    strategy.agreement_seconds = 5.0
    gradients = [tf.zeros(v.shape) for v in variables]
    try:
        strategy.run(optimizer.apply, (gradients, variables))
    finally:
        gone.touch()


def go_on(strategy, optimizer, variables):
    """Go on after an error in a step of the second worker, like a bad batch."""

    def replica(is_bad):
        context = tf.distribute.get_replica_context()
        kernel = tf.ones(variables[0].shape)
        kernel = context.all_reduce("SUM", kernel)
        with tf.control_dependencies([tf.debugging.Assert(~is_bad, ["bad"])]):
            kernel = context.all_reduce("SUM", kernel)
        optimizer.apply([kernel, tf.zeros(variables[1].shape)], variables)

    step = tf.function(lambda is_bad: strategy.run(replica, (is_bad,)))
    for i in range(6):
        try:
            step(tf.constant(IS_WRONG and i == 2))
        except tf.errors.InvalidArgumentError as error:
            if "bad" not in str(error):
                time.sleep(8)  # Until then, the other worker gets its error.
                raise


def own_loop(strategy, wrong):
    """Make steps of one's own after a worker alone has set weights."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        optimizer = keras.optimizers.Adam()
    if wrong:
        model.set_weights([weight + 1 for weight in model.get_weights()])
    weights = model.trainable_variables

    def step(rows):
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(rows, model(rows))
        optimizer.apply(tape.gradient(loss, weights), weights)

    train = tf.function(lambda rows: strategy.run(step, (rows,)))
    data = tf.data.Dataset.from_tensor_slices(X).batch(8)
    for rows in strategy.experimental_distribute_dataset(data):
        train(rows)


def draw_on(strategy):
    """Go on after the error as in `go_on`, but draw batches between steps."""

    def replica(rows, is_bad):
        with tf.control_dependencies([tf.debugging.Assert(~is_bad, ["bad"])]):
            tf.distribute.get_replica_context().all_reduce("SUM", rows)

    step = tf.function(lambda *args: strategy.run(replica, args))
    data = tf.data.Dataset.from_tensor_slices(X).batch(8)
    data = strategy.experimental_distribute_dataset(data)
    for i, rows in enumerate(data):
        try:
            step(rows, tf.constant(IS_WRONG and i == 2))
        except tf.errors.InvalidArgumentError as error:
            if "bad" not in str(error):
                time.sleep(8)  # Until then, the other worker gets its error.
                raise


def train(case):
    """Train with the fault that a case names."""
    wrong = case if IS_WRONG else None
    strategy = tfo.SparseMultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(
            timeout_seconds=5.0 if case == "silent" else None
        )
    )
    if case == "loop, weights":
        own_loop(strategy, wrong)
        return
    if case.startswith(("other rows", "ends early", "killed, ")):
        local_steps(strategy, case)
        return
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(9 if wrong == "model" else 8, name="dense"),
            ]
        )
        momentum = 0.8 if wrong == "settings" else 0.9
        # With this rule only, different rates change weights.
        optimizer = tfo.DGCMomentum(
            *(0.1, momentum),
            min_compress_size=1,
            sparsity=(0.9,),
            rate_in_momentum=False,
        )
        if case.startswith("sharded"):
            # Its owners send all weights, so weights never differ for long.
            optimizer = tfo.ShardedState(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
    is_ahead = wrong in ("step", "sharded, step")
    optimizer.iterations.assign(7 if is_ahead else 0)
    if wrong == "sharded, weights":
        model.set_weights([weight + 1 for weight in model.get_weights()])
    if case == "absent":
        step_late(strategy, optimizer, model.trainable_variables)
    elif case == "parted":
        part(model)
    elif case == "failing":
        go_on(strategy, optimizer, model.trainable_variables)
    elif case == "drawing":
        draw_on(strategy)
    else:
        fit(model, Misbehave(case))
    print("trained to the end")


def error_of(case):
    """Return the error that every worker must get in a case."""
    try:
        train(case)
    except (RuntimeError, tf.errors.InvalidArgumentError) as error:
        return str(error)
    return "trained to the end"


def main():
    """Run the cases of the command line."""
    *cases, last = CASES
    if last == "devices" and IS_WRONG:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * 2,
        )
    report({case: error_of(case) for case in cases})
    train(last)


if __name__ == "__main__":
    main()
