"""Variables and models of all dtypes, for guide.py and its tests."""

import inspect

import keras
import numpy as np
import tensorflow as tf
from scripts.training import summing

import tf_optimizers as tfo

# Values of variables, by dtype, on the first worker and on others. The values
# of the first worker have bits that a conversion would lose.
INTEGERS = {
    f"{sign}int{bits}": (low, high)
    for bits in (8, 16, 32, 64)
    for sign, low, high in (
        ("", -(2 ** (bits - 1)), 2 ** (bits - 1) - 1),
        ("u", 2 ** (bits - 1) + 1, 2**bits - 1),
    )
}
FLOATS = [
    *("bfloat16", "float16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2"),
]
DTYPES = [*INTEGERS, *FLOATS, "complex64", "complex128", "bool", "string"]


def value_of(dtype, worker):
    """Return a worker's initial value; its last row differs by worker."""
    if dtype == "string":
        return tf.constant([["", "é"], ["a longer text", "ab"[worker]]])
    if dtype == "bool":
        return tf.constant([[True, False], [False, worker == 0]])
    if dtype in INTEGERS:
        low, high = INTEGERS[dtype]
        kind = getattr(np, dtype)
        return tf.constant(np.array([[low, high], [3, worker]], kind))
    if dtype.startswith("complex"):
        parts = tf.constant([[0.1, -0.2], [3.0, worker]], tf.float64)
        return tf.cast(tf.complex(parts, 2 * parts), dtype)
    values = tf.constant([[0.3, -1e-3], [np.nan, worker]], tf.float32)
    return tf.cast(values, dtype)


def bits_of(value):
    """Return the bits of a value, which also tell different NaNs apart."""
    value = value.numpy()
    if value.dtype == object:
        return [text.hex() for text in value.ravel()]
    return value.tobytes().hex()


def variables():
    """Return the bits of variables of all dtypes, created in several ways."""
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    worker = strategy.cluster_resolver.task_id
    found = {}
    for dtype in DTYPES:
        value = value_of(dtype, worker)
        with strategy.scope():
            made = [
                keras.Variable(value, dtype=dtype).value,
                keras.Variable(
                    lambda shape, dtype, value=value: value,
                    shape=(2, 2),
                    dtype=dtype,
                ).value,
                tf.Variable(value),
                tf.Variable(value[:0]),
            ]
        found[dtype] = [
            bits_of(part)
            for variable in made
            for part in strategy.experimental_local_results(variable)
        ]
    return found


# Optimizers for models with bfloat16 weights.


def of_keras(kind):
    """Return a factory of optimizers whose betas are not 1 in bfloat16."""
    betas = {"beta_1": 0.5, "beta_2": 0.75, "rho": 0.75, "momentum": 0.5}
    betas |= {"adam_beta_1": 0.5, "adam_beta_2": 0.75}
    known = inspect.signature(kind).parameters
    betas = {name: betas[name] for name in betas if name in known}
    return lambda: summing(kind)(0.125, **betas)


OPTIMIZERS = {
    name: of_keras(kind)
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type)
    and "learning_rate" in inspect.signature(kind).parameters
    and name != "Optimizer"
} | {
    "tfo.Lamb": lambda: tfo.Lamb(0.125),
    "tfo.LANS": lambda: tfo.LANS(0.125),
    "tfo.AdamOffload": lambda: tfo.AdamOffload(0.125),
    "tfo.ShardedState": lambda: tfo.ShardedState(
        of_keras(keras.optimizers.Adam)()
    ),
    "dense DGC": lambda: tfo.DGCMomentum(0.125, min_compress_size=1000),
}
# With these optimizers, one process updates an embedding in another order.
ROUNDING = ("Adafactor", "RMSprop", "ScheduleFreeAdamW")
# The results of these optimizers depend on the number of replicas.
COMPRESSING = {
    "DGC": lambda: tfo.DGCMomentum(
        0.125, sparsity=(0.75,), min_compress_size=1
    ),
    "SparseLoCo": lambda: tfo.SparseLoCo(
        of_keras(keras.optimizers.AdamW)(),
        sparsity=(0.75,),
        min_compress_size=1,
    ),
}
ALL = OPTIMIZERS | COMPRESSING
FEW = ("tfo.AdamOffload",)  # The optimizers of short tests.

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 6, (16, 2))
ROWS = RNG.integers(-1, 2, (16, 4)).astype("float32")
SIGNS = RNG.choice([-1.0, 1.0], (16, 16)).astype("float32")


def linear(signs, outputs):
    """Return a loss whose gradients do not depend on weights."""
    return keras.ops.mean(signs * keras.ops.cast(outputs, "float32"), -1)


def trained(make):
    """Return the bits of bfloat16 weights after some steps, and before.

    The gradient of any set of rows is exact in bfloat16.
    """
    keras.utils.set_random_seed(0)
    ids = keras.Input((2,), dtype="int32")
    rows = keras.Input((4,), dtype="bfloat16")
    layers = [
        keras.layers.Embedding(6, 4, dtype="bfloat16"),
        keras.layers.Dense(8, dtype="bfloat16"),
    ]
    embedded = keras.layers.Flatten(dtype="bfloat16")(layers[0](ids))
    outputs = keras.layers.Concatenate(dtype="bfloat16")(
        [embedded, layers[1](rows)]
    )
    model = keras.Model([ids, rows], outputs)
    model.compile(make(), linear)
    # Keras's own first step may assign to slots before weights have values.
    model.optimizer.build(model.trainable_variables)
    start = [bits_of(weight.value) for weight in model.weights]
    model.fit(
        *([IDS, ROWS], SIGNS),
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    return [[bits_of(weight.value) for weight in model.weights], start]


def models(names=FEW):
    """Return the bits of models that were trained with the named optimizers."""
    with tfo.SparseMultiWorkerMirroredStrategy().scope():
        return {name: trained(ALL[name]) for name in names}


def quantized():
    """Return an int8 model with trainable parts, after training."""
    with tfo.SparseMultiWorkerMirroredStrategy().scope():
        return adapted()


def adapted():
    """Train the weights that LoRA adds to a quantized layer, as in QLoRA."""
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(8)
    model = keras.Sequential([keras.Input((4,)), layer])
    layer.quantize("int8")
    layer.enable_lora(2)
    model.compile(keras.optimizers.Adam(0.125), "mse")
    x, y = ROWS, SIGNS[:, :8]
    losses = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return {
        "dtypes": sorted({weight.dtype for weight in model.weights}),
        "loss": losses.history["loss"],
        "weights": [weight.tolist() for weight in model.get_weights()],
    }


# Layers whose weights may be empty.


class OfGroups(keras.layers.Layer):
    """Adds a row for each group of inputs; there may be no groups."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel")
        self.groups = self.add_weight(shape=(0, 2), name="groups")

    def call(self, rows):
        return rows @ self.kernel + keras.ops.sum(self.groups, 0)


EMPTY = {
    "SGD": lambda: keras.optimizers.SGD(0.125),
    "Lamb": lambda: tfo.Lamb(0.125),
    "ShardedState": lambda: tfo.ShardedState(keras.optimizers.Adam(0.125)),
    "DGC": COMPRESSING["DGC"],
    "SparseLoCo": COMPRESSING["SparseLoCo"],
}
FEW_EMPTY = ("Lamb",)


def grouped(make):
    """Return the kernel of a layer with an empty weight, trained and not."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), OfGroups()])
    model.compile(make(), "mse")
    start = model.get_weights()[0].tolist()
    x, y = ROWS, SIGNS[:, :2]
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    kernel, groups = model.get_weights()
    assert groups.shape == (0, 2)
    return [kernel.tolist(), start]


def empty(names=FEW_EMPTY):
    """Return `grouped` for the named optimizers, by name."""
    with tfo.SparseMultiWorkerMirroredStrategy().scope():
        return {name: grouped(EMPTY[name]) for name in names}
