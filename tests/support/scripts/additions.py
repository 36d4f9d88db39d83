"""Checks that replicas stay bitwise equal: `additions.py WHERE HOW NAME...`.

WHERE is `workers`, replicas of our strategy, or `devices`, two logical GPUs
under `MirroredStrategy`. HOW is `plain`, or `permuted`, which adds repeated
positions in a random order each time, as a GPU does.
"""

import contextlib
import functools
import sys

import keras
import numpy as np
import tensorflow as tf
from permuted import permuted_additions
from real_workers import report

import tf_optimizers as tfo
from tf_optimizers.compression import exchanges

EPOCHS = 3
RNG = np.random.default_rng(0)
# The embedding has few rows, so that most are repeated in a batch.
ROWS = RNG.integers(0, 5, (64, 6))
VALUES = RNG.standard_normal((64, 32)).astype("float32")
CLASSES = ROWS.sum(1)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SMALL = {"min_compress_size": 1000}  # All variables but biases.
HALF = {"sparsity": (0.5,), **SMALL}


def around(make, **settings):
    return lambda: tfo.SparseLoCo(make(0.01), **settings)


MAKE = {
    "lamb": functools.partial(tfo.Lamb, 0.01),
    "lans": functools.partial(tfo.LANS, 0.01),
    "offload": functools.partial(tfo.AdamOffload, 0.01),
    "dgc": functools.partial(tfo.DGCMomentum, 0.1, **HALF),
    "dgc, few": functools.partial(
        tfo.DGCMomentum, 0.1, sparsity=(0.95,), value_dtype="int4", **SMALL
    ),
    "dgc, sharded": functools.partial(tfo.DGCMomentum, 0.1, **HALF),
    "dgc, unmasked": functools.partial(
        tfo.DGCMomentum,
        0.1,
        momentum_masking=False,
        clipnorm=1.0,
        rampdown_begin_step=3,
        **HALF,
    ),
    "loco": around(keras.optimizers.AdamW, **HALF),
    "loco of 4 steps": around(keras.optimizers.AdamW, sync_every=4, **HALF),
    "loco, ahead": around(
        keras.optimizers.AdamW,
        sync_every=2,
        step_ahead=0.25,
        value_dtype="int2",
        **HALF,
    ),
    "loco, overlapped": around(
        keras.optimizers.AdamW, sync_every=2, overlap=True, **HALF
    ),
    "loco, sharded": around(tfo.Lamb, **HALF),
    "sharded state": lambda: tfo.ShardedState(keras.optimizers.Adam(0.01)),
    "sharded lamb": lambda: tfo.ShardedState(
        tfo.Lamb(0.01, global_clipnorm=1.0, use_ema=True)
    ),
    # Under TensorFlow's strategies, Keras adds repeated rows.
    "adam": functools.partial(keras.optimizers.Adam, 0.01),
    "sgd": functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9),
}
# Cases whose replicas agree even under TensorFlow's strategies, which support
# neither shards nor overlap.
ONLY_WORKERS = ("adam", "sgd", "loco, overlapped")
OURS = [n for n in MAKE if n not in ONLY_WORKERS and ", sharded" not in n]
DENSE = ", no embedding"
EVERY = [name + kind for name in MAKE for kind in ("", DENSE)]


def make_model(name):
    """Return a model with only two shapes; each new shape compiles kernels."""
    keras.utils.set_random_seed(1)
    rows = [keras.Input((6,), dtype="int32"), keras.layers.Embedding(32, 32)]
    rows += [keras.layers.GlobalAveragePooling1D()]
    dense = [keras.layers.Dense(32) for _ in range(3)]
    return keras.Sequential(
        [*([keras.Input((32,))] if name.endswith(DENSE) else rows), *dense]
    )


def fit(strategy, name):
    """Return the weights on this process's replicas, [replicas, all]."""
    exchanges.LEAST_SAVING = 0 if ", sharded" in name else 2
    with strategy.scope():
        model = make_model(name)
        model.compile(MAKE[name.removesuffix(DENSE)](), LOSS)
    rows = VALUES if name.endswith(DENSE) else ROWS
    model.fit(rows, CLASSES, batch_size=32, epochs=EPOCHS, verbose=0)
    copies = [
        strategy.experimental_local_results(w.value) for w in model.weights
    ]
    return np.stack(
        [
            np.concatenate([c.numpy().reshape(-1) for c in each])
            for each in zip(*copies, strict=True)
        ]
    )


def moved(weights, name):
    """Return how far a training has moved the weights."""
    start = [w.reshape(-1) for w in make_model(name).get_weights()]
    return float(np.abs(weights - np.concatenate(start)).max())


def two_gpus():
    (gpu,) = tf.config.list_physical_devices("GPU")
    part = tf.config.LogicalDeviceConfiguration(memory_limit=4096)
    tf.config.set_logical_device_configuration(gpu, [part, part])
    # NCCL does not accept two replicas on one card.
    return tf.distribute.MirroredStrategy(
        ["GPU:0", "GPU:1"], tf.distribute.HierarchicalCopyAllReduce()
    )


def main():
    """Report weights as hexadecimal bytes, by name and replica."""
    where, how, *names = sys.argv[1:]
    strategy = (
        two_gpus()
        if where == "devices"
        else tfo.SparseMultiWorkerMirroredStrategy()
    )
    order = permuted_additions if how == "permuted" else contextlib.nullcontext
    found = {}
    for name in names or EVERY:
        with order():
            weights = fit(strategy, name)
        found[name] = {
            "moved": moved(weights, name),
            "replicas": [row.tobytes().hex() for row in weights],
        }
    report(found)


if __name__ == "__main__":
    main()
