"""Checks the exchanges of workers about the next batch."""

import graphlib
import hashlib
import inspect
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from real_workers import report
from scripts import training
from versions import KERAS

import tf_optimizers as tfo
from tf_optimizers.workers._compat import coordination
from tf_optimizers.workers.data.batch_metadata import rows_of
from tf_optimizers.workers.data.look_ahead import FIRST_BATCH

# Older versions of Keras draw batches inside the function of the step.
DRAWS_EAGERLY = KERAS >= (3, 16)
# With this size, there are five full batches, and one with a single row.
BATCH = 19


def batches():
    """Return a dataset of global batches."""
    data = (training.ROWS, training.CLASSES)
    return tf.data.Dataset.from_tensor_slices(data).batch(BATCH)


def places(graph, before=0):
    """Return each collective's place in the longest chain that leads to it.

    Collectives that run only for an iterator's first batch are left out.

    Args:
        graph: The graph of a function.
        before: The number of collectives before the inputs of the graph.
    """
    inputs = {tensor.op for tensor in graph.inputs}
    ahead = {
        op: {*op.control_inputs, *(tensor.op for tensor in op.inputs)}
        for op in graph.get_operations()
    }
    reached, found = {}, {}
    for op in graphlib.TopologicalSorter(ahead).static_order():
        count = max((reached[other] for other in ahead[op]), default=0)
        if op in inputs:
            count = before
        if op.type.startswith("Collective"):
            count = found[op.name] = count + 1
        for name in called(op):
            inner = places(graph._get_function(name).graph, count)
            count = max([count, *inner.values()])
            found |= {f"{op.name}/{name}/{key}": n for key, n in inner.items()}
        reached[op] = count
    return found


def called(op):
    """Return the functions that an op may run after the first batch."""
    if "PartitionedCall" in op.type:
        return [op.get_attr("f").name]
    if op.type in ("If", "StatelessIf"):
        if op.name.split("/")[-1].startswith(FIRST_BATCH):
            return []
        return [
            op.get_attr(f"{which}_branch").name for which in ("then", "else")
        ]
    return []


def train_function(strategy):
    """Return `places` in the function that `fit` calls for a step."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", training.LOSS, metrics=["accuracy"])
    model.fit(batches(), shuffle=False, verbose=0)
    function = inspect.getclosurevars(model.train_function).nonlocals
    drawn = iter(strategy.experimental_distribute_dataset(batches()))
    traced = function["multi_step_on_iterator"]
    if DRAWS_EAGERLY:
        traced, drawn = function["one_step_on_data"].__wrapped__, next(drawn)
    return places(traced.get_concrete_function(drawn).graph)


def own_lengths(strategy):
    """Return each batch's rows: on this worker's replicas, and in total.

    Each worker draws its own data, once eagerly and once in a `tf.function`.
    Data end at different steps, and no worker knows its end in advance.
    """

    def make(context):
        rows = 7 - 3 * context.input_pipeline_id
        return tf.data.Dataset.range(rows).filter(lambda i: i >= 0).batch(2)

    def rows(batch):
        counted = rows_of(batch)
        return [tf.stack(counted.own), counted.total]

    data = strategy.distribute_datasets_from_function(make)
    draw = tf.function(lambda iterator: rows(next(iterator)))
    iterator, drawn = iter(data), []
    while True:
        try:
            drawn.append(draw(iterator))
        except tf.errors.OutOfRangeError:
            break
    return [
        [np.concatenate([here, [total]]).tolist() for here, total in each]
        for each in (map(rows, data), drawn)
    ]


def several_steps(strategy):
    """Return the result of training with several steps per call."""
    return training.fit(
        strategy, "adam", batch_size=BATCH, steps_per_execution=2
    )


def endless(strategy):
    """Return weights after epochs that continue one iterator."""
    with strategy.scope():
        model = training.make_model()
        model.compile(training.OPTIMIZERS["adam"](), training.LOSS)
    data = batches().repeat()
    model.fit(data, steps_per_epoch=4, epochs=3, shuffle=False, verbose=0)
    return {"weights": [w.tolist() for w in model.get_weights()]}


def asks_for_the_spec(strategy):
    """Return sums from a function whose signature is `element_spec`."""
    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.range(7).batch(4)
    )

    @tf.function(input_signature=[data.element_spec])
    def total(batch):
        return strategy.reduce(
            "SUM", strategy.run(tf.reduce_sum, (batch,)), axis=None
        )

    return [int(total(batch)) for batch in data]


def one_after_another(strategy):
    """Return the message that the second worker read before its second draw.

    The first worker writes the message after its own second draw. So this draw
    does not wait for the second worker's notes on the third batch.
    """
    iterator = iter(strategy.experimental_distribute_dataset(batches()))
    next(iterator)
    if strategy.extended.worker_index > 0:
        heard = coordination.read("tests/has_drawn", 60.0)
        next(iterator)
        return heard
    next(iterator)
    coordination.write("tests/has_drawn", "has drawn")
    return None


def eagerly_and_not(strategy):
    """Return the rows of batches that are drawn in three ways, in turn.

    The ways are: eagerly, in a function that takes the iterator, and in a
    function that captures it. In between, another iterator draws batches.
    """
    growing = tf.data.Dataset.range(1, 21).map(lambda rows: tf.zeros([rows]))
    data = strategy.distribute_datasets_from_function(lambda _: growing)
    first, second = iter(data), iter(data)
    passed = tf.function(lambda iterator: rows_of(next(iterator)).total)
    captured = tf.function(lambda: rows_of(next(first)).total)
    turns = [lambda: rows_of(next(first)).total, lambda: passed(first)]
    turns += [lambda: passed(second), *turns, captured]
    turns += [lambda: rows_of(next(second)).total, captured]
    return [int(turn()) for turn in turns]


def two_kinds(strategy):
    """Return the rows that one function draws from shared data and own data.

    The function is traced with relaxed shapes, as Keras traces its steps.
    """
    data = tf.data.Dataset.range(10).batch(4)
    shared = iter(strategy.experimental_distribute_dataset(data))
    own = iter(strategy.distribute_datasets_from_function(lambda _: data))
    total = tf.function(
        lambda iterator: rows_of(next(iterator)).total, reduce_retracing=True
    )
    return [int(total(each)) for each in (shared, own, shared, own)]


def dropped(strategy):
    """Return the seconds that it takes to delete iterators of data in use.

    TensorFlow tunes data 2.6 s and 5.1 s after an iterator has started. If data
    are tuned, deleting ten iterators blocks in every run. If only the transfer
    to devices is tuned, deleting blocks in every second run.
    """
    data = strategy.experimental_distribute_dataset(batches())
    iterators = [iter(data) for _ in range(10)]
    for iterator in iterators:
        next(iterator)
    time.sleep(2.7)
    begin = time.monotonic()
    iterators.clear()
    del iterator
    return time.monotonic() - begin


class Messages(keras.callbacks.Callback):
    """Counts the collectives of each step, by channel; keeps losses."""

    def __init__(self, extended):
        super().__init__()
        self.extended, self.counts, self.losses = extended, [], []

    def counted(self):
        self.extended.background.wait()  # A thread may still exchange notes.
        # Threads may use the other channels at any time.
        return [c.progress()[0][0] for c in self.extended.channels[:3]]

    def on_train_batch_begin(self, batch, logs=None):
        self.before = self.counted()

    def on_train_batch_end(self, batch, logs=None):
        pairs = zip(self.counted(), self.before, strict=True)
        self.counts.append([now - before for now, before in pairs])
        self.losses.append(float(logs["loss"]))


def local_rounds(strategy):
    """Return the messages and the results of steps in rounds of four.

    There are six batches; the last one has a single row.
    """

    def own(context):
        rows = 3 + context.input_pipeline_id
        data = tf.data.Dataset.from_tensor_slices(
            (training.ROWS, training.CLASSES)
        )
        return data.batch(rows, drop_remainder=True).repeat()

    def train(relies=True, is_own=False, overlap=False, **kwargs):
        with strategy.scope():
            model = training.make_model()
            optimizer = tfo.SparseLoCo(
                keras.optimizers.Adam(0.01),
                sync_every=4,
                sparsity=(0.9,),
                min_compress_size=1000,
                overlap=overlap,
            )
            model.compile(
                optimizer, training.LOSS, metrics=["accuracy"], **kwargs
            )
        model.make_train_function()
        if not relies:
            # Without `with_rounds`, every step exchanges.
            model.train_function = inspect.unwrap(model.train_function)
        messages = Messages(strategy.extended)
        data = batches()
        if is_own:
            data = strategy.distribute_datasets_from_function(own)
        history = model.fit(
            data,
            epochs=2,
            steps_per_epoch=6 if is_own else None,
            verbose=0,
            callbacks=[messages],
        )
        weights = b"".join(w.tobytes() for w in model.get_weights())
        return {
            "counts": messages.counts,
            "losses": messages.losses,
            "history": history.history,
            "weights": hashlib.sha256(weights).hexdigest(),
        }

    found = {
        "in rounds": train(),
        "in every step": train(relies=False),
        "own": train(is_own=True),
        "overlap": train(overlap=True),
    }
    if len(strategy.extended.worker_devices) > 1:  # Only long tests run these.
        found["overlap, in every step"] = train(relies=False, overlap=True)
        found["own, in every step"] = train(relies=False, is_own=True)
        found["several a call"] = train(steps_per_execution=2)
    return found


def overlapping_loop(strategy):
    """Return the digest of weights after a custom loop with `overlap`."""
    with strategy.scope():
        model = training.make_model()
        optimizer = tfo.SparseLoCo(
            *(keras.optimizers.SGD(0.1), 2),
            sparsity=(0.9,),
            min_compress_size=1,
            overlap=True,
        )
        optimizer.build(model.trainable_weights)
    weights = model.trainable_weights

    def step():
        context = tf.distribute.get_replica_context()
        share = 1.0 + tf.cast(context.replica_id_in_sync_group, "float32")
        optimizer.apply([share * tf.ones(w.shape) for w in weights], weights)

    train = tf.function(lambda: strategy.run(step))
    for _ in range(5):
        train()
    optimizer.synchronize()
    values = b"".join(w.tobytes() for w in model.get_weights())
    return hashlib.sha256(values).hexdigest()


TRAININGS = {"several steps": several_steps, "endless": endless}
OTHERS = {
    "train function": train_function,
    "own lengths": own_lengths,
    "one after another": one_after_another,
    "eagerly and not": eagerly_and_not,
    "two kinds": two_kinds,
    "asks for the spec": asks_for_the_spec,
    "dropped": dropped,
    "local rounds": local_rounds,
    "overlapping loop": overlapping_loop,
}


def main():
    """Run the scenarios on the command line, under our strategy."""
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    scenarios = TRAININGS | OTHERS
    report({name: scenarios[name](strategy) for name in sys.argv[1:]})


if __name__ == "__main__":
    main()
