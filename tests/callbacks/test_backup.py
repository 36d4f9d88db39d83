"""Backups: a training that was interrupted goes on as if nothing had been."""

import hashlib
import json
import shutil

import keras
import pytest
import tensorflow as tf
from backups import (
    OPTIMIZERS,
    Interrupt,
    Interruption,
    X,
    assert_equal,
    epochs_of,
    fit,
    interrupt,
    make_model,
    make_small,
    reset,
    state,
)

import tf_optimizers as tfo

# Their state is of the kind that others have, too.
LONG = ["lans", "keras-adam"]


@pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic")
@pytest.mark.filterwarnings("ignore:A run of `SparseLoCo`")
@pytest.mark.parametrize(
    ("name", "replicas", "freq", "step", "execution"),
    [
        *((name, "two", 4, 9, 1) for name in OPTIMIZERS if name not in LONG),
        *(
            pytest.param(name, "two", 4, 9, 1, marks=pytest.mark.long)
            for name in LONG
        ),
        ("dgc", "one", "epoch", 8, 1),
        ("dgc", "one", 4, 14, 1),
        ("dgc", "one", 6, 6, 1),
        ("lamb", "one", 4, 5, 2),
    ],
    ids=lambda value: str(value),
)
def test_resumed_training_equals_an_uninterrupted_one(
    tmp_path, strategies, name, freq, step, replicas, execution
):
    """Killed after `step` calls of as many batches as `execution` says."""

    def make():
        return make_model(
            OPTIMIZERS[name],
            strategies[replicas],
            steps_per_execution=execution,
        )

    model = make()
    with strategies[replicas].scope():
        model.optimizer.build(model.trainable_variables)
    start = state(model)
    logs = fit(model, tmp_path / "a")
    expected = state(model)
    reset(model, start)
    interrupt(model, tmp_path / "b", step, save_freq=freq)
    resumed = make()
    found = fit(resumed, tmp_path / "b", save_freq=freq)
    assert_equal(state(resumed), expected)
    assert 0 < len(found) < 4
    assert found == logs[-len(found) :]
    assert list(tmp_path.iterdir()) == []


class Own(keras.Model):
    """Has an optimizer of its own, besides that of `compile`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(8)
        self.own = keras.optimizers.Adam(0.01)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        weights = self.dense.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        gradients = tape.gradient(loss, [weight.value for weight in weights])
        self.own.apply(gradients, weights)
        return {"loss": loss}


def make_own(build=True):
    keras.utils.set_random_seed(1)
    model = Own()
    model(X)
    model.compile("sgd")
    if build:
        model.own.build(model.trainable_variables)
    return model


def test_optimizer_of_a_train_step_is_resumed(tmp_path):
    model = make_own()
    fit(model, tmp_path)
    resumed = make_own()
    interrupt(resumed, tmp_path, 7)
    resumed = make_own()
    assert epochs_of(fit(resumed, tmp_path)) == [1, 2]
    assert_equal(resumed.get_weights(), model.get_weights())
    assert resumed.own.iterations.numpy() == 18


def test_optimizers_that_are_not_built_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Received: `own` of .* `model.own.b"):
        fit(make_own(build=False), tmp_path)


@pytest.mark.parametrize("place", ["layer", "loss"])
def test_unseeded_random_numbers_go_on(tmp_path, place):
    """Of a generator that Keras creates with a layer, or in the first step."""

    def noisy(x):
        return x + keras.random.normal((1, 8))

    def start():
        keras.utils.clear_session()  # as a new process would
        keras.utils.set_random_seed(1)
        layer = keras.layers.Lambda(noisy, output_shape=(8,))
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(8)]
            + [layer] * (place == "layer")
        )

        def loss(y, p):
            return keras.ops.mean((y - noisy(p)) ** 2)

        model.compile("sgd", "mse" if place == "layer" else loss)
        return model

    expected = start()
    fit(expected, tmp_path)
    interrupt(start(), tmp_path, 9, save_freq=4)
    resumed = start()
    fit(resumed, tmp_path, save_freq=4)
    assert_equal(state(resumed), state(expected))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"backup_dir": 3}, TypeError, "`backup_dir` must be a path"),
        ({"backup_dir": ""}, ValueError, "`backup_dir` must be a folder"),
        ({"backup_dir": "gs://a/b"}, ValueError, "Mount the storage"),
        ({"save_freq": "batch"}, TypeError, "save_freq='batch'"),
        ({"save_freq": False}, TypeError, "save_freq=False"),
        ({"save_freq": 2.5}, TypeError, "save_freq=2.5"),
        ({"save_freq": 0}, ValueError, "save_freq=0"),
        ({"double_checkpoint": 2}, TypeError, "double_checkpoint=2"),
        ({"delete_checkpoint": "no"}, TypeError, "delete_checkpoint='no'"),
        ({"name": 1}, TypeError, "`name` must be a non-empty.*name=1"),
        ({"name": ""}, ValueError, "`name` must be a non-empty.*name=''"),
    ],
    ids=str,
)
def test_bad_argument_is_refused(kwargs, error, message):
    with pytest.raises(error, match=message):
        tfo.callbacks.BackupAndRestore(**{"backup_dir": "x"} | kwargs)


def test_unbuilt_model_is_refused(tmp_path):
    callback = tfo.callbacks.BackupAndRestore(tmp_path)
    callback.set_model(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="must be built"):
        callback.on_train_begin()


def restarted(folder):
    """Return a copy of a folder, which no `fit` of this process has used."""
    return shutil.copytree(folder, folder.with_name(f"{folder.name}-again"))


@pytest.mark.filterwarnings("ignore:A backup must be of this `fit`")
def test_each_of_two_fits_goes_on_from_its_own_backup(tmp_path):
    def script(folder, *callbacks):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        logs = [fit(model, folder, epochs=2, save_freq=4)]
        logs += [fit(model, folder, *callbacks, epochs=3, save_freq=4)]
        return model, logs

    def start(*args):
        keras.utils.set_random_seed(1)
        return script(*args)

    expected, logs = start(tmp_path / "a")
    with pytest.raises(Interruption):
        start(tmp_path / "b", Interrupt(9))
    resumed, found = start(restarted(tmp_path / "b"))
    assert_equal(state(resumed), state(expected))
    assert found == [logs[0], logs[1][1:]]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_backup_of_another_fit_is_left_alone_and_told_of(tmp_path):
    model = make_small(tmp_path, 7, save_freq="epoch", name="other")
    with pytest.warns(UserWarning, match="'other'.*is 'fit 1'.*name='other'"):
        assert epochs_of(fit(model, tmp_path)) == [0, 1, 2]
    assert epochs_of(fit(model, tmp_path, name="mine")) == [0, 1, 2]
    assert epochs_of(fit(model, tmp_path, name="other")) == [1, 2]
    assert not tmp_path.exists()


def test_backup_without_a_name_is_everybodys(tmp_path):
    """As those of 0.1.0 are, which have no seeds either."""
    model = make_small(tmp_path, 7, save_freq="epoch")
    path = tmp_path / "00000001.json"
    content = json.loads(json.loads(path.read_text())["content"])
    del content["name"], content["seeds"]
    text = json.dumps(content)
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, "content": text}))
    assert epochs_of(fit(model, tmp_path, name="mine")) == [1, 2]
    assert not tmp_path.exists()


def test_kept_backups_are_gone_on_from(tmp_path):
    model = make_small(tmp_path, 0)
    for epochs, expected in [(1, [0]), (3, [1, 2])]:
        found = fit(model, tmp_path, epochs=epochs, delete_checkpoint=False)
        assert epochs_of(found) == expected
    before = model.get_weights()
    with pytest.warns(UserWarning, match="epochs=3, and .* after epoch 3"):
        assert fit(model, tmp_path) == []
    assert_equal(model.get_weights(), before)


def test_second_fit_starts_at_its_first_epoch(tmp_path):
    model = make_model(OPTIMIZERS["lamb"])
    interrupt(model, tmp_path, 7)
    assert epochs_of(fit(model, tmp_path)) == [1, 2]
    assert epochs_of(fit(model, tmp_path, epochs=1)) == [0]
