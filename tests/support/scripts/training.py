"""Keras's methods under our strategy: `training.py SCENARIO...`."""

import hashlib
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf
from real_workers import report

import tf_optimizers as tfo

RNG = np.random.default_rng(0)
ROWS = RNG.integers(0, 50, (96, 6))
CLASSES = ROWS.sum(1) % 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def summing(kind):
    """Return an optimizer class that sums duplicate rows of embeddings.

    Our strategy sums these rows. Without it, Keras squares each of them.
    """
    if tf.distribute.has_strategy():
        return kind

    class Summing(kind):
        def apply(self, grads, trainable_variables=None):
            grads = [
                tf.convert_to_tensor(g)
                if isinstance(g, tf.IndexedSlices)
                else g
                for g in grads
            ]
            return super().apply(grads, trainable_variables)

    return Summing


OPTIMIZERS = {
    "sgd": lambda **kw: keras.optimizers.SGD(0.1, momentum=0.9, **kw),
    "adam": lambda **kw: summing(keras.optimizers.Adam)(0.01, **kw),
    "adamw": lambda **kw: summing(keras.optimizers.AdamW)(0.01, **kw),
    "lamb": lambda **kw: tfo.Lamb(0.01, **kw),
    "lans": lambda **kw: tfo.LANS(0.01, **kw),
    "adam_offload": lambda **kw: tfo.AdamOffload(0.01, **kw),
    "dgc": lambda rate=0.1, **kw: tfo.DGCMomentum(
        rate,
        rampup_begin_step=2,
        rampup_step=4,
        sparsity=(0.75, 0.99),
        min_compress_size=1000,
        **kw,
    ),
    # Names of inner optimizers may differ between workers.
    "loco": lambda **kw: tfo.SparseLoCo(
        keras.optimizers.AdamW(0.01, name=f"adamw_{os.getpid()}"),
        rampup_begin_step=2,
        sparsity=(0.9,),
        min_compress_size=1000,
        **kw,
    ),
}


def make_model(*, normalized=False):
    """Return a model with an embedding, whose gradients are sparse."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.BatchNormalization(synchronized=True)]
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(50, 8),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            *(layers if normalized else []),
            keras.layers.Dense(3),
        ]
    )


class Hashes(keras.callbacks.Callback):
    """Records the bits of the weights after every epoch."""

    def __init__(self):
        super().__init__()
        self.hashes = []

    def on_epoch_end(self, epoch, logs=None):
        data = b"".join(w.tobytes() for w in self.model.get_weights())
        self.hashes.append(hashlib.sha256(data).hexdigest())


def fit(strategy, name, *, measured=False, **kwargs):
    """Train, and if `measured` also evaluate and predict; return results."""
    normalized = kwargs.pop("normalized", False)
    callbacks = kwargs.pop("callbacks", [])
    execution = {
        key: kwargs.pop(key)
        for key in ("steps_per_execution", "jit_compile")
        if key in kwargs
    }
    data = {"batch_size": 24} | {
        key: kwargs.pop(key)
        for key in ("class_weight", "sample_weight", "batch_size")
        if key in kwargs
    }
    with strategy.scope():
        model = make_model(normalized=normalized)
        optimizer = OPTIMIZERS[name](**kwargs)
        model.compile(optimizer, LOSS, metrics=["accuracy"], **execution)
    if measured:
        data["validation_data"] = ROWS[:48], CLASSES[:48]
        data["validation_freq"] = 2
    hashes = Hashes()
    history = model.fit(
        ROWS,
        CLASSES,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks, hashes],
        **data,
    )
    result = {
        "history": history.history,
        "hashes": hashes.hashes,
        "weights": [w.tolist() for w in model.get_weights()],
    }
    if measured:
        result |= {
            "evaluate": model.evaluate(ROWS, CLASSES, batch_size=24, verbose=0),
            "predict": model.predict(ROWS, batch_size=24, verbose=0).tolist(),
        }
    return result


def monitored(strategy):
    """Train with a monitor: all workers measure, and one writes."""
    folder = pathlib.Path(os.environ["FOLDER"], "tensorboard")
    monitor = tfo.callbacks.CompressionMonitor(every=2, log_dir=folder)
    result = fit(strategy, "dgc", callbacks=[monitor])
    return result | {"event_files": len([*folder.iterdir()])}


class Scale(keras.callbacks.Callback):
    """Adds the loss scale and the number of updates to the logs."""

    def on_epoch_end(self, epoch, logs=None):
        optimizer = self.model.optimizer
        logs["scale"] = float(optimizer.dynamic_scale.numpy())
        logs["updates"] = int(optimizer.iterations.numpy())


def half(strategy, name, **kwargs):
    """Train in float16; at first, the gradient of one row overflows.

    The loss is linear, and float16 holds all gradients exactly.
    """
    targets = (ROWS[:24, :1] + np.arange(8)) % 5 - 2.0
    targets[6] = 128
    execution = {
        key: kwargs.pop(key)
        for key in ("run_eagerly", "steps_per_execution")
        if key in kwargs
    }
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with strategy.scope():
            keras.utils.set_random_seed(1)
            rows = keras.Input((4,), dtype="int32")
            table = keras.layers.Embedding(50, 2)(rows)
            ones = keras.Input((3,))
            outputs = keras.layers.Add()(
                [keras.layers.Flatten()(table), keras.layers.Dense(8)(ones)]
            )
            model = keras.Model([rows, ones], outputs)
            model.compile(
                OPTIMIZERS[name](**kwargs),
                lambda y, prediction: keras.ops.mean(y * prediction, -1),
                **execution,
            )
    finally:
        keras.config.set_dtype_policy("float32")
    history = model.fit(
        [ROWS[:24, :4], np.ones((24, 3))],
        targets,
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[Scale()],
    )
    return {
        "history": history.history,
        "weights": [w.tolist() for w in model.get_weights()],
    }


class Rate(keras.optimizers.schedules.LearningRateSchedule):
    """A user's schedule, without `get_config`."""

    def __call__(self, step):
        return 0.1


def custom_loop(strategy):
    """Train as in TensorFlow's guide; the first step builds the optimizer."""
    with strategy.scope():
        model = make_model()
        optimizer = OPTIMIZERS["dgc"](Rate())
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )
    data = tf.data.Dataset.from_tensor_slices((ROWS, CLASSES)).batch(24)

    @tf.function
    def step(batch):
        def replica(rows, classes):
            with tf.GradientTape() as tape:
                losses = loss(classes, model(rows, training=True))
                mean = tf.nn.compute_average_loss(losses, global_batch_size=24)
            gradients = tape.gradient(mean, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return mean

        return strategy.reduce("SUM", strategy.run(replica, batch), axis=None)

    losses = [
        float(step(batch))
        for _ in range(3)
        for batch in strategy.experimental_distribute_dataset(data)
    ]
    return {
        "losses": losses,
        "weights": [w.tolist() for w in model.get_weights()],
    }


# Evaluating with three is enough: evaluation needs no optimizer.
MEASURED = ("sgd", "lamb", "dgc")
SCENARIOS = {
    **{
        name: lambda s, name=name: fit(s, name, measured=name in MEASURED)
        for name in OPTIMIZERS
        if name != "adamw"
    },
    "uneven": lambda s: fit(s, "dgc", batch_size=19),
    # The last batch has one row, for two workers.
    "uneven adam": lambda s: fit(s, "adam", batch_size=19),
    "accumulated": lambda s: fit(s, "dgc", gradient_accumulation_steps=2),
    "accumulated adam": lambda s: fit(s, "adam", gradient_accumulation_steps=2),
    "accumulated offload": lambda s: fit(
        s, "adam_offload", gradient_accumulation_steps=2
    ),
    "steps_per_execution": lambda s: fit(s, "dgc", steps_per_execution=2),
    "class_weight": lambda s: fit(
        s, "adamw", class_weight={0: 1, 1: 3, 2: 0.5}
    ),
    "sample_weight": lambda s: fit(
        s, "sgd", sample_weight=np.linspace(0, 2, len(ROWS))
    ),
    "half": lambda s: half(s, "sgd"),
    "half eager": lambda s: half(s, "adam", run_eagerly=True),
    "half dgc": lambda s: half(s, "dgc"),
    "half offload": lambda s: half(
        s, "adam_offload", gradient_accumulation_steps=2, steps_per_execution=2
    ),
    "monitored": monitored,
    "normalized": lambda s: fit(s, "dgc", normalized=True, measured=True),
    "custom_loop": custom_loop,
}

# XLA cannot compile collectives; one replica needs none.
ONE_REPLICA = {"compiled": lambda s: fit(s, "lamb", jit_compile=True)}


def run(strategy, names):
    """Return the results of scenarios by name."""
    scenarios = SCENARIOS | ONE_REPLICA
    return {name: scenarios[name](strategy) for name in names}


def main():
    """Run the scenarios that the command line names."""
    report(run(tfo.SparseMultiWorkerMirroredStrategy(), sys.argv[1:]))


if __name__ == "__main__":
    main()
