"""A script with several strategies, as in Keras's guide: `guide.py PART...`."""

import contextlib
import copy
import os
import pathlib
import random
import sys
import warnings

import keras
import numpy as np
import state
import tensorflow as tf
from real_workers import report
from scripts import dtypes, keras_tools, moved

import tf_optimizers as tfo
from tf_optimizers.workers import strategy
from tf_optimizers.workers.steps import common_state, metric_reads

Strategy = tfo.SparseMultiWorkerMirroredStrategy
FOLDER = pathlib.Path(os.environ.get("FOLDER", "."))
ROWS = np.arange(24.0, dtype="float32")[:, None]


def worker_of(strategy):
    return strategy.cluster_resolver.task_id


def message_of(function):
    """Return the error that every worker must get in a function, or None."""
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def as_lists(values):
    return [value.tolist() for value in values]


# Keras's guide creates a strategy, and more in a function that it calls again.


def digits():
    """Return small training, validation and test data in the form of MNIST."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (240, 8, 8))
    labels = (images[:, 0].mean(1) > 127).astype("int32")
    images = images.reshape(-1, 64).astype("float32") / 255
    parts = (slice(0, 160), slice(160, 208), slice(208, None))
    return [
        tf.data.Dataset.from_tensor_slices((images[p], labels[p])).batch(16)
        for p in parts
    ]


def digits_of_rows():
    return np.ones((24, 64), "float32"), np.arange(24) % 10


def compiled_model():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def make_or_restore_model(folder):
    checkpoints = sorted(folder.glob("*.keras"))
    if checkpoints:
        return keras.models.load_model(checkpoints[-1])
    return compiled_model()


def run_training(epochs):
    """Train a model from its checkpoint, if there is one; return results."""
    strategy = Strategy()
    folder = FOLDER / f"worker-{worker_of(strategy)}"
    folder.mkdir(exist_ok=True)
    with strategy.scope():
        model = make_or_restore_model(folder)
    train, validation, _ = digits()
    start = int(model.optimizer.iterations.numpy())
    path = folder / f"after-{start}-{{epoch}}.keras"
    callback = keras.callbacks.ModelCheckpoint(path, save_freq="epoch")
    history = model.fit(
        train,
        epochs=epochs,
        validation_data=validation,
        callbacks=[callback],
        verbose=0,
    )
    return model, {"start": start, "loss": history.history["loss"]}


def guide():
    model, first = run_training(epochs=2)
    train, _, test = digits()
    result = {
        "evaluate": model.evaluate(test, verbose=0),
        "runs": [first, run_training(epochs=1)[1]],
    }
    # The first model continues under the first strategy.
    model.fit(train, verbose=0)
    return result | {"weights": as_lists(model.get_weights())}


class Counting(keras.Model):
    """A model that is never compiled."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean()

    def step(self, value):
        self.mean.update_state(value)


def uncompiled():
    strategy = Strategy()
    with strategy.scope():
        model = Counting()
    strategy.run(model.step, (tf.constant(1.0 + worker_of(strategy)),))
    return float(model.mean.result())


class Adding(keras.Model):
    """Has a step without a collective."""

    def __init__(self):
        super().__init__()
        self.sum = keras.metrics.Sum()
        self.mean = keras.metrics.Mean()

    def test_step(self, values):
        self.sum.update_state(values)
        self.mean.update_state(values)
        return {}


def read():
    """Return metrics after each step, and the number of gathers."""
    strategy = Strategy()
    with strategy.scope():
        model = Adding()
    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(ROWS).batch(3)
    )
    step = tf.function(lambda values: strategy.run(model.test_step, (values,)))
    asked, found = [], []
    gather = metric_reads.gather_statements
    metric_reads.gather_statements = lambda *args: (
        asked.append(0) or gather(*args)
    )
    for batch in data:
        step(batch)
        found.append([float(m.result()) for m in (model.sum, model.mean)])
        if len(found) == 4:
            model.reset_metrics()
    metric_reads.gather_statements = gather
    model.sum.total.assign(model.mean.count)
    copied = float(model.sum.result())
    # Restoring a checkpoint assigns in this way.
    strategy.experimental_local_results(model.sum.total.value)[0].assign(1.0)
    restored = float(model.sum.result())
    return {
        "found": found,
        "asked": len(asked),
        "copied": copied,
        "restored": restored,
    }


def assigned():
    """Return state that replicas assign, and the subjects of all exchanges."""
    strategy = Strategy()
    asked = []
    gather = common_state.gather_statements
    common_state.gather_statements = lambda *args: (
        asked.append(args[1]) or gather(*args)
    )
    with strategy.scope():
        model = state.center()
    data = state.X, state.Y
    state.fit(model, epochs=1)
    measured = [model.evaluate(*data, verbose=0) for _ in range(2)]
    model.predict(state.X, verbose=0)
    path = FOLDER / f"state-{worker_of(strategy)}.weights.h5"
    if worker_of(strategy) == 0:  # State is equal, so one worker may save.
        model.save_weights(path)
    measured.append(state.center_of(model).tolist())
    model.train_on_batch(*data)
    model.save_weights(path)
    common_state.gather_statements = gather
    saved = state.center_of(model).tolist()
    model.set_weights([weight * 0 for weight in model.get_weights()])
    model.load_weights(path)
    loaded = state.center_of(model).tolist()
    return {"asked": asked, "measured": measured, "saved": [saved, loaded]}


def copied():
    """Return the state of a model that a callback sets in each batch.

    The callback reads the worker's own values. Also return the errors if one
    worker alone sets weights, and if workers copy weights within a round, or
    pass them to another optimizer.
    """
    strategy = Strategy()
    with strategy.scope():
        model, other = state.center(), state.center()
    copy = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: other.set_weights(
            model.get_weights()
        )
    )
    state.fit(model, epochs=1, callbacks=[copy])
    own = state.center_of(other).tolist()
    other.predict(state.X, verbose=0)
    found = [state.center_of(each).tolist() for each in (other, model)]
    if worker_of(strategy) == 0:
        other.set_weights([weight + 1 for weight in other.get_weights()])
    message = message_of(lambda: other.predict(state.X, verbose=0))
    with strategy.scope():
        optimizer = tfo.SparseLoCo(keras.optimizers.SGD(0.1), sync_every=4)
        model.compile(optimizer, "mse")
    model.train_on_batch(state.X, state.Y)
    other.set_weights(model.get_weights())
    within = message_of(lambda: other.predict(state.X, verbose=0))
    optimizer.synchronize()
    other.set_weights(model.get_weights())
    other.predict(state.X, verbose=0)
    model.train_on_batch(state.X, state.Y)
    with strategy.scope():
        model.compile("sgd", "mse")
    taken = message_of(lambda: model.train_on_batch(state.X, state.Y))
    errors = {"error": message, "within": within, "taken": taken}
    return {"own": own, "found": found} | errors


def first_replicas():
    """Return states that each worker takes from its first replica."""
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    with Strategy().scope():
        model = state.center(aggregation="only_first_replica")
        center = tf.Variable(np.zeros(2, "float32"), aggregation=first)
    model.compile(model.optimizer, state.pull(center))
    state.fit(model, epochs=1)
    return [*state.center_of(model).tolist(), *center.numpy().tolist()]


def made_outside():
    """Return the state of a loss function, made outside of the scope."""
    center = tf.Variable(np.zeros(2, "float32"))
    with Strategy().scope():
        model = state.compiled(keras.layers.Dense(2))
    model.compile(model.optimizer, state.pull(center))
    state.fit(model)
    return center.numpy().tolist()


def parted():
    """Return the error of a weight that a layer assigns in each step."""
    with Strategy().scope():
        model = state.compiled(state.Weight(2), keras.layers.Dense(2))
    return message_of(lambda: state.fit(model))


def another_cluster():
    Strategy()
    cluster = tf.train.ClusterSpec({"worker": ["localhost:1", "localhost:2"]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="worker", task_id=0
    )
    return message_of(lambda: Strategy(resolver))


def versions():
    """Return the error of a worker with another version of a package."""
    own = np.__version__
    if '"index": 0' not in os.environ["TF_CONFIG"]:
        np.__version__ = "0.1"
    message = message_of(Strategy)
    np.__version__ = own
    return [own, message]


def hashes():
    """Return the warnings for equal and for different hashes of a text."""
    own, told = strategy.text_hash, []
    for is_equal in (True, False):
        if not is_equal and '"index": 1' in os.environ["TF_CONFIG"]:
            strategy.text_hash = lambda: own() + 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Strategy()
        told.append([str(each.message) for each in caught])
        told[-1] += [pathlib.Path(each.filename).stem for each in caught]
    strategy.text_hash = own
    return told


def shifted():
    """Return a weight's path, and the error after one worker changes it."""
    strategy = Strategy()
    for _ in range(worker_of(strategy)):
        keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with strategy.scope():
        layers = [keras.layers.Dense(2), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((1,)), *layers])
        optimizer = tfo.Lamb(exclude_from_weight_decay=["bias"])
        optimizer.exclude_from_weight_decay(var_list=[model.weights[2]])
        model.compile(optimizer, "mse")
    model.fit(ROWS, ROWS, epochs=2, verbose=0)
    moved = model.weights[2]

    def move(batch, logs):
        if worker_of(strategy):
            moved.assign(moved + 1.0)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=move)
    message = message_of(
        lambda: model.fit(ROWS, ROWS, callbacks=[callback], verbose=0)
    )
    return [moved.path, message]


# Data.


class Seeing(keras.Model):
    """Records the rows that this worker trains on, by epoch."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.epochs = [[]]

    def call(self, rows):
        return self.dense(rows)

    def train_step(self, data):
        rows = tf.reshape(data[0], [-1])
        tf.numpy_function(self.see, [rows], [])
        return super().train_step(data)

    def see(self, rows):
        self.epochs[-1].extend(int(row) for row in rows)


def seeing_model(strategy):
    with strategy.scope():
        model = Seeing()
        model.compile("sgd", "mse")
    return model


def seen(model, data, fits=1, **kwargs):
    """Return the rows that this worker sees in two epochs of some `fit`s."""
    model.epochs = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: model.epochs.append([])
    )
    for _ in range(fits):
        model.fit(data, epochs=2, callbacks=[note], verbose=0, **kwargs)
    return model.epochs


class Shuffled(keras.utils.PyDataset):
    """Eight batches of three rows, in an order that NumPy draws.

    NumPy also draws for every batch, as for augmented images. A batch has a row
    for each of up to three workers.
    """

    order = np.arange(24)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        np.random.rand()
        rows = ROWS[self.order[3 * index : 3 * index + 3]]
        return rows, rows

    def on_epoch_begin(self):
        self.order = np.random.permutation(24)


def pairs():
    return tf.data.Dataset.from_tensor_slices((ROWS, ROWS))


def draw_alone(strategy):
    """Draw random numbers only on the chief, as a script may."""
    if worker_of(strategy) == 0:
        tf.random.uniform([])
        random.random()
        np.random.rand()


def shuffled_file(number):
    """Return the eight rows of one of three files."""
    rows = tf.constant(ROWS)[8 * number : 8 * number + 8]
    return tf.data.Dataset.from_tensor_slices((rows, rows)).shuffle(8)


def order():
    """Return the rows of epochs of several kinds of data without a seed."""
    strategy = Strategy()
    drawn = {"constructor": [random.random(), np.random.rand()]}
    model = seeing_model(strategy)
    epochs = {"arrays": seen(model, ROWS, 2, y=ROWS, batch_size=6)}
    if worker_of(strategy) == 0:
        # A script may train another model on one worker.
        compiled_model().fit(*digits_of_rows(), verbose=0)
        epochs["branches"] = seen(model, ROWS, y=ROWS, batch_size=6)
    else:
        epochs["branches"] = seen(model, ROWS, y=ROWS, batch_size=6)
    epochs["tf.data"] = seen(model, pairs().shuffle(24).batch(6))
    numbers = tf.data.Dataset.range(3)
    epochs["flat_map"] = seen(model, numbers.flat_map(shuffled_file).batch(6))
    parallel = numbers.interleave(shuffled_file, 3, num_parallel_calls=2)
    epochs["interleave"] = seen(model, parallel.batch(6))
    draw_alone(strategy)
    epochs["PyDataset"] = seen(model, Shuffled(), shuffle=True)
    batches = iter(np.split(np.concatenate([ROWS, ROWS[::-1]]), 16))
    generator = ((batch, batch) for batch in batches)
    epochs["generator"] = seen(model, generator, steps_per_epoch=8)
    drawn["fit"] = [random.random(), np.random.rand()]
    keras.utils.set_random_seed(3)
    epochs["seeded"] = seen(model, ROWS, y=ROWS, batch_size=6)
    return {"epochs": epochs, "drawn": drawn}


class OfFiles(keras.utils.PyDataset):
    """A dataset of writable slices of files, which are not copied."""

    def __init__(self, folder):
        super().__init__()
        self.files = [
            np.load(folder / f"{name}.npy", mmap_mode="r+") for name in "xy"
        ]

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return tuple(file[8 * index : 8 * index + 8] for file in self.files)


def files():
    """Return whether files have the same content after training on them."""
    strategy = Strategy()
    folder = FOLDER / f"files-{worker_of(strategy)}"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in "xy":
        np.save(folder / f"{name}.npy", rng.random((32, 16), "float32"))
    before = [file.tolist() for file in OfFiles(folder).files]
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16)])
        model.compile("sgd", "mse")
    model.fit(OfFiles(folder), epochs=2, verbose=0)
    return before == [file.tolist() for file in OfFiles(folder).files]


def kinds():
    """Return the losses of data that cannot be averaged over workers."""
    strategy = Strategy()
    losses = {}
    for kind in ("float32", "uint8", "int16", "bool"):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.layers.Rescaling(1.0), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile("sgd", "mse")
        data = (ROWS % 2).astype(kind)
        loss = model.fit(data, data, shuffle=False, verbose=0).history["loss"]
        losses[kind] = [*loss, model.evaluate(data, data, verbose=0)]
    return losses


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.001),
    "adam": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(0.1, 6),
        use_ema=True,
        gradient_accumulation_steps=2,
    ),
    "dgc": lambda: tfo.DGCMomentum(0.001, min_compress_size=1),
    "offload": lambda: tfo.AdamOffload(0.1),
}


class Logging(keras.callbacks.Callback):
    """Records the step and the rate, as users' callbacks do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        optimizer = self.model.optimizer
        self.seen += [int(optimizer.iterations), float(optimizer.learning_rate)]


def numbers():
    """Return the results of `float`, `int` and `complex` of variables."""
    strategy = Strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(OPTIMIZERS["adam"](), "mse", metrics=["mae"])
        sgd = keras.optimizers.SGD(0.001)
    callback = Logging()
    model.fit(ROWS, ROWS, epochs=2, verbose=0, callbacks=[callback])
    found = {
        "sgd": [int(sgd.iterations), float(sgd.learning_rate)],
        "adam": callback.seen,
    }
    with strategy.scope():
        plain = tf.Variable(2.5)
        own = tf.Variable(
            1.5,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        several = tf.Variable([1.0, 2.0])
    strategy.run(lambda: own.assign(3.5))
    try:
        float(several)
    except TypeError:
        found["several"] = "TypeError"
    copied = copy.deepcopy(plain).assign_add(1.0)
    return found | {
        "plain": [float(plain), int(plain), complex(plain).real],
        "own": [float(own), int(own)],
        "copied": float(copied),
    }


def outside():
    """Return results of `compile` outside of the scope and inside."""
    strategy = Strategy()
    results = {}
    for name in OPTIMIZERS:
        for is_inside in (True, False):
            keras.utils.set_random_seed(0)
            with strategy.scope():
                model = keras.Sequential(
                    [keras.Input((1,)), keras.layers.Dense(1)]
                )
            with strategy.scope() if is_inside else contextlib.nullcontext():
                metric = keras.metrics.MeanAbsoluteError(name="mine")
                model.compile(OPTIMIZERS[name](), "mse", metrics=[metric])
            history = model.fit(
                *(ROWS, ROWS / 24),
                epochs=2,
                batch_size=8,
                shuffle=False,
                verbose=0,
            )
            results[f"{name} {is_inside}"] = {
                "history": history.history,
                "weights": as_lists(model.get_weights()),
                "state": as_lists(v.numpy() for v in model.optimizer.variables),
            }
    return results


LOOPED = {
    "sgd": OPTIMIZERS["sgd"],
    "adam": OPTIMIZERS["adam"],
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1), initial_scale=2.0
    ),
}


def looped():
    """Return the state of optimizers created and built inside and outside."""
    strategy = Strategy()

    def state(name, made, built):
        keras.utils.set_random_seed(0)
        places = {"inside": strategy.scope, "outside": contextlib.nullcontext}
        with places[made]():
            optimizer = LOOPED[name]()
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        if built:
            with places[built]():
                optimizer.build(model.trainable_variables)

        def replica(rows):
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_mean(model(rows) ** 2))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

        step = tf.function(lambda rows: strategy.run(replica, (rows,)))
        data = tf.data.Dataset.from_tensor_slices(ROWS / 24).batch(8)
        for rows in strategy.experimental_distribute_dataset(data):
            step(rows)
        return as_lists(
            v.numpy() for v in [*model.weights, *optimizer.variables]
        )

    return {
        name: [
            state(name, made, built)
            for made in ("inside", "outside")
            for built in (None, "inside", "outside")
            if (made, built) != ("inside", "outside")  # Keras raises an error.
        ]
        for name in LOOPED
    }


class Positions(keras.layers.Layer):
    """Adds an embedding of the position, as in Transformers."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(5, 3)

    def build(self, shape):
        self.embedding.build(shape)

    def call(self, x):
        return x + self.embedding(tf.range(5))


def trained_positions():
    """Return an embedding whose rows are in the gradients of all replicas."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((5, 3)), Positions(), keras.layers.Dense(2)]
    )
    model.compile(keras.optimizers.Adam(0.1), "mse")
    x = np.random.default_rng(0).random((8, 5, 3)).astype("float32")
    model.fit(x, x[..., :2], batch_size=4, epochs=2, shuffle=False, verbose=0)
    return as_lists(model.get_weights())


def rows():
    """Return `trained_positions` of two workers."""
    with Strategy().scope():
        return trained_positions()


def seeds():
    """Return the errors of workers that shuffle differently."""
    strategy = Strategy()
    distribute = strategy.experimental_distribute_dataset
    own = pairs().shuffle(24, seed=worker_of(strategy)).batch(6)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    messages = {
        "shuffle": message_of(lambda: distribute(own)),
        "not shared": message_of(lambda: distribute(own.with_options(options))),
    }
    tf.random.set_seed(None)
    if worker_of(strategy) == 0:
        branched = pairs().shuffle(24).batch(6)
    else:
        branched = pairs().shuffle(24).batch(6)
    messages["branches"] = message_of(lambda: distribute(branched))
    tf.random.set_seed(5)
    draw_alone(strategy)
    unseeded = pairs().shuffle(24).batch(6)
    messages["drawn alone"] = message_of(lambda: distribute(unseeded))
    tf.random.set_seed(worker_of(strategy))
    model = seeing_model(strategy)
    messages["arrays"] = message_of(lambda: model.fit(ROWS, ROWS, verbose=0))
    keras.utils.set_random_seed(0)  # Later parts need equal seeds.
    return messages


def counts():
    """Return results with a different number of batches on each worker."""
    strategy = Strategy()
    size = 3 + 2 * worker_of(strategy)

    def message(make):
        return message_of(
            lambda: strategy.distribute_datasets_from_function(
                lambda context: make(pairs().batch(2).take(size))
            )
        )

    def unknown(columns=2):
        return strategy.distribute_datasets_from_function(
            lambda context: (
                pairs()
                .batch(2)
                .take(size)
                .filter(lambda *pair: True)
                .map(lambda *pair: pair[:columns])
            )
        )

    model = seeing_model(strategy)
    # Keras decays the weights even without gradients.
    with strategy.scope():
        model.compile(keras.optimizers.AdamW(weight_decay=0.1), "mse")
    return {
        "known": message(lambda data: data),
        "infinite": message(
            lambda data: data.repeat(None if worker_of(strategy) else 1)
        ),
        "epochs": seen(model, unknown()),
        "evaluate": model.evaluate(unknown(), verbose=0),
        "predict": len(model.predict(unknown(1), verbose=0)),
        "updates": int(model.optimizer.iterations.numpy()),
    }


def looked_at():
    """Return pairs: the dataset that one worker reads alone, and all data."""
    unseeded, seeded = (pairs().shuffle(24, seed=seed) for seed in (None, 3))
    halves = [pairs().take(12), pairs().skip(12).shuffle(12, seed=4)]
    kept = pairs().shuffle(24).cache()
    inputs, labels = (
        tf.data.Dataset.from_tensor_slices(ROWS).shuffle(24, seed=seed)
        for seed in (1, 2)
    )
    return {
        "unseeded": (unseeded, unseeded.batch(6)),
        "seeded": (seeded, seeded.batch(6)),
        "later": (halves[1], halves[0].concatenate(halves[1]).batch(6)),
        "cached": (kept, kept.batch(6)),
        "one of two": (labels, tf.data.Dataset.zip((inputs, labels)).batch(6)),
        "repeated": (unseeded, unseeded.repeat().batch(6)),
    }


def looked(names=("one of two",)):
    """Return the rows of three epochs. One worker also reads the data alone."""
    strategy = Strategy()
    tf.random.set_seed(None)
    model = seeing_model(strategy)

    def epochs(part, data, who, **kwargs):
        def begin(epoch, logs):
            model.epochs.append([])
            if epoch != 1 and worker_of(strategy) == who:
                list(part.take(1))

        model.epochs = []
        callback = keras.callbacks.LambdaCallback(on_epoch_begin=begin)
        kwargs = {"callbacks": [callback], "verbose": 0, **kwargs}
        model.fit(data, **kwargs)
        return model.epochs

    found = {
        name: epochs(
            *(part, data, i % 2),  # The two workers take turns.
            epochs=3,
            steps_per_epoch=4 if name == "repeated" else None,
        )
        for i, (name, (part, data)) in enumerate(looked_at().items())
        if name in (names or looked_at())
    }
    with strategy.scope():
        rows = looked_between(worker_of(strategy) == 0)
    return {"rows": found, "seeded": rows}


def looked_between(looks):
    """Return the rows of two calls of `fit`; if `looks`, read in between."""
    tf.random.set_seed(None)
    model = Seeing()
    model.compile("sgd", "mse")
    seeded = pairs().shuffle(24, seed=3)
    for _ in range(2):
        model.epochs.append([])
        model.fit(seeded.batch(6), shuffle=False, verbose=0)
        if looks:
            list(seeded.take(1))
    return model.epochs


class Permuted(Shuffled):
    """Draws its order from NumPy, at the end of an epoch."""

    on_epoch_begin = keras.utils.PyDataset.on_epoch_begin

    def on_epoch_end(self):
        self.order = np.random.permutation(24)


def permuted():
    """Return an error, and rows in NumPy's order; one worker also draws."""
    strategy = Strategy()
    tf.random.set_seed(None)
    model = seeing_model(strategy)
    model.epochs = []

    def begin(epoch, logs):
        model.epochs.append([])
        draw_alone(strategy)

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=begin)
    arguments = {"epochs": 3, "callbacks": [callback], "verbose": 0}
    message = error_of_graph(lambda: model.fit(Permuted(), **arguments))
    return message, model.epochs


def numbered():
    """Yield batches of four rows, without end."""
    first = 0.0
    while True:
        rows = first + ROWS[:4]
        yield rows, rows**2
        first += 4


def generated():
    """Return losses of two generators that several iterators read ahead."""
    with Strategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.set_weights([np.ones((1, 1)), np.zeros(1)])
    rows, others, seen = numbered(), numbered(), []
    for _ in range(2):
        history = model.fit(
            rows,
            steps_per_epoch=2,
            epochs=2,
            validation_data=others,
            validation_steps=3,
            verbose=0,
        )
        seen += [*history.history["loss"], *history.history["val_loss"]]
        seen.append(model.evaluate(others, steps=3, verbose=0))
        seen += np.ravel(model.predict(rows, steps=2, verbose=0)).tolist()
    return seen


def trained_on_batches():
    """Return losses, predictions and weights for single batches of arrays."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.001), "mse", metrics=["mae"])
    return {
        "losses": [
            [float(number) for number in model.train_on_batch(rows, 2 * rows)]
            for rows in (ROWS[:5], ROWS[5:9], ROWS[:1])
        ],
        "test": [float(n) for n in model.test_on_batch(ROWS[:5], ROWS[:5])],
        "predictions": np.ravel(model.predict_on_batch(ROWS[:5])).tolist(),
        "weights": [float(np.squeeze(w)) for w in model.get_weights()],
    }


def passed_apart(worker, modes):
    """Return the errors of batches that differ between workers, by mode."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    own = ROWS[worker : worker + 6]
    found = []
    for run_eagerly in modes:
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        start = as_lists(model.get_weights())
        messages = [
            error_of_graph(lambda: model.train_on_batch(own, own)),
            error_of_graph(lambda: model.test_on_batch(own[:1], own[:1])),
            error_of_graph(lambda: model.predict_on_batch(own[:1])),
            error_of_graph(lambda: model.predict_on_batch(ROWS[worker:6])),
        ]
        found.append([*messages, as_lists(model.get_weights()) != start])
        # Rows may be augmented: equal labels show that the rows are the same.
        model.train_on_batch(own, ROWS[:6])
        model.predict_on_batch(ROWS[:6])
    return found


def passed_in_other_forms(worker, modes):
    """Return the errors of batches of different forms, by mode and name."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    rows, weights = ROWS[:6], np.ones(6) if worker else None
    dtype = "float64" if worker else "float32"
    calls = {
        # At this call, the loss is not built yet.
        "labels": lambda: model.test_on_batch(rows, ROWS[: 6 + worker]),
        "weights": lambda: model.train_on_batch(rows, rows, weights),
        "dtype": lambda: model.train_on_batch(rows.astype(dtype), rows),
        "inputs": lambda: model.predict_on_batch(np.ones((6, 1 + worker))),
        "same": lambda: model.train_on_batch(rows, rows),
    }
    found = []
    for run_eagerly in modes:
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        found.append({})
        for name, call in calls.items():
            try:
                found[-1][name] = error_of_graph(call)
            except ValueError as error:
                found[-1][name] = f"ValueError: {error}"
    return found


def batches(modes=(False,)):
    strategy = Strategy()
    worker = worker_of(strategy)
    with strategy.scope():
        apart = passed_apart(worker, modes)
        forms = passed_in_other_forms(worker, modes)
        return trained_on_batches() | {"apart": apart, "forms": forms}


def drawn_alone(strategy):
    """Return data whose rows may differ between workers."""
    alone = worker_of(strategy) == 0

    def shuffle_rows(*pair):
        order = tf.random.shuffle(tf.range(6))
        return tuple(tf.gather(part, order) for part in pair)

    return {
        "shuffled in a map": pairs()
        .batch(24)
        .map(lambda x, y: (tf.random.shuffle(x),) * 2)
        .unbatch()
        .batch(6),
        "filtered": pairs()
        .filter(lambda x, y: tf.random.uniform([]) < 0.7)
        .repeat(10)
        .batch(6),
        "before": tf.data.Dataset.from_tensor_slices(
            (np.roll(ROWS, int(alone)),) * 2
        ).batch(6),
    }


def compared():
    """Return errors for different rows, and for augmented rows."""
    strategy = Strategy()
    tf.random.set_seed(None)
    model = seeing_model(strategy)

    def message(data, **kwargs):
        model.epochs = [[]]
        return error_of_graph(lambda: model.fit(data, verbose=0, **kwargs))

    messages = {
        name: message(data) for name, data in drawn_alone(strategy).items()
    }
    # The callback draws before the data are permuted, which is detected late.
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: draw_alone(strategy)
    )
    for workers in (1, 2):
        data = Shuffled(workers=workers)
        messages[f"callback, {workers}"] = message(data, callbacks=[callback])

    def augment(x, y):
        return x + tf.random.uniform(tf.shape(x)), y

    augmented = pairs().batch(6).map(augment)
    return {
        "differ": messages,
        "augmented": message(augmented),
        "like one": message(
            pairs().batch(1).map(lambda x, y: (augment(x, y)[0], 0.0 * y))
        ),
    }


def error_of_graph(function):
    """Return the error that every worker must get in a step, or None."""
    try:
        function()
    except tf.errors.InvalidArgumentError as error:
        return error.message
    return None


def without_a_batch(rows):
    """Drop rows 4 to 7, which are a batch, and row 8 of the next batch."""
    return tf.boolean_mask(rows, (rows[:, 0] < 4) | (rows[:, 0] > 8))


def by_rows():
    """Return predictions for two record files, and for a single row."""
    strategy = Strategy()
    paths = []
    for i, count in enumerate((9, 3)):
        paths.append(str(FOLDER / f"{worker_of(strategy)}-{i}.records"))
        with tf.io.TFRecordWriter(paths[-1]) as writer:
            for row in range(count):
                writer.write(str(100 * i + row).encode())

    def parse(text):
        return tf.reshape(tf.strings.to_number(text), [1])

    with strategy.scope():
        same = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])

    def predicted(data, **kwargs):
        return same.predict(data, verbose=0, **kwargs)[:, 0].tolist()

    read = tf.data.TFRecordDataset(paths).map(parse)
    one_file = tf.data.TFRecordDataset(paths[:1]).map(parse)
    options, steps = tf.data.Options(), []
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.FILE
    )
    by_file = read.batch(4).map(lambda rows: rows).with_options(options)
    count = keras.callbacks.LambdaCallback(
        on_predict_batch_end=lambda batch, logs: steps.append(batch)
    )
    found = predicted(by_file, callbacks=[count])
    return {
        "files": predicted(read.batch(4)),
        "one": predicted(one_file.batch(4)),
        "by file": [sorted(found), len(steps)],
        "emptied": predicted(read.batch(4).map(without_a_batch)),
    }


PARTS = {
    part.__name__: part
    for part in (
        *(guide, uncompiled, read, another_cluster),
        *(versions, hashes, shifted, assigned, copied, first_replicas, parted),
        made_outside,
        *(order, seeds, counts, files, kinds, outside, looped, rows),
        *(compared, by_rows, looked, permuted, batches, generated),
        *(numbers, dtypes.variables, dtypes.models, dtypes.quantized),
        *(dtypes.empty, moved.moved),
        *(keras_tools.callbacks, keras_tools.lora),
        *(keras_tools.orbax, keras_tools.hub),
    )
} | {
    "every looked": lambda: looked(names=None),
    "every batches": lambda: batches(modes=(False, True)),
    "every models": lambda: dtypes.models(dtypes.ALL),
    "every empty": lambda: dtypes.empty(dtypes.EMPTY),
    "every callbacks": lambda: keras_tools.callbacks(keras_tools.OPTIMIZERS),
    "every moved": lambda: moved.moved(every=True),
    "every lora": lambda: keras_tools.lora(keras_tools.OPTIMIZERS),
}

if __name__ == "__main__":
    report({name: PARTS[name]() for name in sys.argv[1:]})
