"""XLA, by which Keras compiles steps by default on a machine with a GPU."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_equal
from keras.optimizers import SGD, LossScaleOptimizer
from real_workers import output_of

import tf_optimizers as tfo

pytestmark = [
    pytest.mark.usefixtures("pretended_gpu"),
    pytest.mark.filterwarnings("ignore:.*saves traffic:UserWarning"),
]

X = np.random.default_rng(0).standard_normal((16, 4)).astype("float32")
Y = np.random.default_rng(1).standard_normal((16, 3)).astype("float32")


def dgc():
    return tfo.DGCMomentum(0.1, sparsity=(0.5,), min_compress_size=1)


def offload():
    return tfo.AdamOffload(0.1)


def in_a_group():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("`MultiOptimizer` needs Keras 3.15")
    groups = keras.optimizers.OptimizerMap(SGD(0.1), {".*bias": offload()})
    return keras.optimizers.MultiOptimizer(groups)


MAKERS = {
    "adam_offload": offload,
    "dgc": dgc,
    "sparse_loco": lambda: tfo.SparseLoCo(
        SGD(0.1), sparsity=(0.5,), min_compress_size=1
    ),
    "local_steps": lambda: tfo.SparseLoCo(SGD(0.1), sync_every=2),
    "scaled": lambda: LossScaleOptimizer(dgc()),
    "shared": lambda: tfo.ShardedState(offload()),
    "scaled_shared": lambda: LossScaleOptimizer(tfo.ShardedState(offload())),
    "group": in_a_group,
}
# The other cases cover these.
LONG = ("local_steps", "scaled", "shared")
each_optimizer = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.long] * (name in LONG))
        for name, make in MAKERS.items()
    ],
)


@pytest.fixture(autouse=True)
def default_device():
    """Return a GPU or, like one, a device other than the host."""
    gpus = tf.config.list_logical_devices("GPU")
    with tf.device("GPU:0" if gpus else "CPU:1"):
        yield


def make_model(kind=keras.Sequential):
    return kind([keras.Input((4,)), keras.layers.Dense(3)])


def fit(model):
    """Train, and check that weights move."""
    before = model.get_weights()
    model.fit(X, Y, batch_size=8, verbose=0)
    for weight, start in zip(model.get_weights(), before, strict=True):
        assert np.abs(weight - start).max() > 1e-3


@each_optimizer
def test_auto_means_not_by_xla(make, tmp_path):
    model = make_model()
    model.compile(make(), "mse")
    assert model.jit_compile is False
    fit(model)
    for _ in range(2):  # `SparseLoCo` ends its round of two local steps here.
        model.train_on_batch(X, Y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    copied = make_model()
    copied.compile_from_config(model.get_compile_config())
    for other in (loaded, copied):
        assert other.jit_compile is False
        fit(other)


def test_other_optimizers_are_compiled_by_xla():
    elsewhere = [offload(), dgc()]
    for optimizer in ("sgd", tfo.Lamb(0.1), tfo.LANS(0.1)):
        model = make_model()
        model.compile(optimizer, "mse")
        assert model.jit_compile is True
        assert model.get_compile_config()["jit_compile"] is True
    fit(model)
    assert make_model().jit_compile is True
    del elsewhere


def test_auto_considers_an_optimizer_set_after_compile():
    class Pair(keras.Model):
        """Is compiled like the GANs in Keras's examples."""

        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def build(self, shape):
            self.layer.build(shape)

        def call(self, x):
            return self.layer(x)

        def compile(self, second, **kwargs):
            super().compile(**kwargs)
            self.second = second

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
            weights = self.trainable_variables
            self.second.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    model = Pair(keras.layers.Dense(3))
    model.build((None, 4))
    model.compile(offload())
    fit(model)
    assert model.jit_compile is False
    model.compile(offload(), jit_compile=True)
    assert model.jit_compile is True
    assert_refused(model, "AdamOffload keeps its state")
    model = make_model()
    model.compile("sgd", "mse")
    assert model.jit_compile is True
    model.optimizer = offload()
    assert model.jit_compile is False
    fit(model)


COMPILED_EARLIER = """
import warnings

import keras
import tensorflow as tf

import tf_optimizers as tfo

gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
models = []
for devices, jit_compile in [([gpu], "auto"), ([], True), ([], "auto")]:
    tf.config.list_physical_devices = lambda kind=None: devices
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse", jit_compile=jit_compile)
    models.append((model, devices))
for model, devices in models:
    print(model.jit_compile)
    model.optimizer = tfo.AdamOffload()
    with warnings.catch_warnings(record=True) as caught:
        print(model.jit_compile, model.jit_compile, len(caught))
"""


def test_auto_considers_an_optimizer_made_after_compile():
    """The first of our optimizers changes models that exist already.

    Without a GPU, only an explicit True can have turned XLA on.
    """
    lines = output_of(COMPILED_EARLIER).splitlines()
    assert [line.split() for line in lines] == [
        *(["True"], ["False", "False", "1"]),
        *(["True"], ["True", "True", "0"]),
        *(["False"], ["False", "False", "0"]),
    ]


def assert_refused(model, start):
    before = model.get_weights()
    with pytest.raises(RuntimeError) as error:
        model.fit(X, Y, batch_size=8, verbose=0)
    message = str(error.value)
    assert message.startswith(start), message
    assert "jit_compile=False" in message
    assert "Exception encountered" not in message
    assert_equal(model.get_weights(), before)


@pytest.mark.parametrize(
    ("make", "start"),
    [(offload, "AdamOffload keeps"), (dgc, "`DGCMomentum` cannot run")],
    ids=["adam_offload", "dgc"],
)
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_explicit_xla_keeps_its_error(make, start, policy):
    keras.config.set_dtype_policy(policy)
    try:
        model = make_model()
        for _ in range(2):  # Earlier calls may have asked for anything.
            model.compile(make(), "mse", jit_compile=True)
            assert model.jit_compile is True
            assert_refused(model, start)
            model.compile(make(), "mse")
            assert model.jit_compile is False
        model.jit_compile = True
        assert_refused(model, start)
    finally:
        keras.config.set_dtype_policy("float32")
