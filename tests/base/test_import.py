"""`import tf_optimizers` in new processes."""

import os

import keras
import pytest
from programs import groups
from real_workers import PACKAGE, environment, output_of, python_path

import tf_optimizers as tfo
from tf_optimizers._compat.patches import PATCHES, WITHOUT_XLA

BEFORE_KERAS = """
import sys
import tf_optimizers
import keras
optimizer = keras.saving.load_model(sys.argv[1]).optimizer
print(*(type(it).__module__ for it in (optimizer, optimizer._learning_rate)))
for name in ("AdamOffload", "DGCMomentum", "LANS", "SparseLoCo"):
    assert keras.saving.get_registered_object(f"tf_optimizers>{name}"), name
"""

# A new version of TensorFlow may remove these.
WITHOUT_PRIVATE_MODULES = """
import sys
import keras
import tensorflow as tf
from tensorflow.python import distribute
for name in (
    "collective_all_reduce_strategy", "cross_device_ops", "cross_device_utils"
):
    sys.modules["tensorflow.python.distribute." + name] = None
    delattr(distribute, name)
del keras.layers.BatchNormalization._moments
import tf_optimizers as tfo
model = keras.saving.load_model(sys.argv[1])
model.fit(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0, callbacks=[
    tfo.callbacks.TrustRatioMonitor(), tfo.callbacks.BackupAndRestore("b")
])
variable = keras.Variable([1.0])
for optimizer in (tfo.AdamOffload(0.1), tfo.DGCMomentum(0.1), tfo.LANS(0.1)):
    optimizer.apply([tf.constant([1.0])], [variable])
print(type(model.optimizer).__module__, int(model.optimizer.iterations))
assert sorted(tfo.__all__) == [name for name in dir(tfo) if name in tfo.__all__]
try:
    from tf_optimizers import *
except ImportError as error:
    print(error)
"""


REPLACES = """
import sys
import keras
import tensorflow as tf

def functions():
    modules = [
        module for name, module in sys.modules.items()
        if name.startswith(("keras.", "tensorflow.python."))
    ]
    owners = {*modules}
    for module in modules:
        owners |= {x for x in vars(module).values() if isinstance(x, type)}
    return {
        (owner, name): value
        for owner in owners
        for name, value in vars(owner).items()
        if callable(value) or isinstance(value, property)
    }

def train(optimizer):
    optimizer.apply([tf.constant([1.0])], [keras.Variable([1.0])])

def replaced():
    return sorted(
        f"keras.{owner.__name__}.{name}"
        for (owner, name), value in functions().items()
        if owner in owners and before.get((owner, name)) is not value
    )

train(keras.optimizers.Adam(0.1))
before = functions()
owners = {owner for owner, _ in before}
import tf_optimizers as tfo
for kind in (tfo.LANS, tfo.Lamb):
    train(kind(0.1))
print(replaced())
for kind in (tfo.AdamOffload, tfo.DGCMomentum):
    train(kind(0.1))
print(replaced())
"""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(tfo.Lamb(tfo.schedules.LansSchedule(0.1, 2, 2, 2)), "mse")
    path = tmp_path_factory.mktemp("model") / "model.keras"
    model.save(path)
    return path


def run(program, model_file):
    environment = os.environ | {"PYTHONPATH": python_path(PACKAGE)}
    return output_of(
        program, model_file, env=environment, cwd=model_file.parent
    ).splitlines()


@pytest.mark.long
def test_saved_model_finds_its_classes_when_keras_is_imported_later(model_file):
    assert run(BEFORE_KERAS, model_file) == [
        "tf_optimizers.lamb tf_optimizers.schedules"
    ]


@pytest.mark.long
def test_one_process_needs_no_private_module_of_distribute(model_file):
    trained, error = run(WITHOUT_PRIVATE_MODULES, model_file)
    assert trained == "tf_optimizers.lamb 1"
    assert "tensorflow.python.distribute" in error


def test_one_process_patches_only_the_choice_of_xla(model_file):
    (patch,) = [p for p in PATCHES if WITHOUT_XLA in p.features]
    names = sorted(patch.names)
    assert run(REPLACES, model_file) == ["[]", str(names)]


def test_processes_of_tests_get_the_path_of_the_tests(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "given")
    for found in (environment(tmp_path), groups._environment()):
        assert found["PYTHONPATH"].split(os.pathsep)[-1] == "given"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'tf_optimizers' has no .*'Lam'"):
        tfo.Lam  # noqa: B018
