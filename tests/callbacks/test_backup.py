"""An interrupted training resumes as if nothing had happened."""

import hashlib
import json
import shutil

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_equal
from backups import (
    NONE,
    OPTIMIZERS,
    Interrupt,
    Interruption,
    X,
    Y,
    epochs_of,
    fit,
    interrupt,
    make_model,
    make_small,
    reset,
    state,
)

import tf_optimizers as tfo

# Other cases have the same kinds of state.
LONG = ["lamb", "lans", "loco", "keras-adam", "rounds", "adam_offload"]


@pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic")
@pytest.mark.parametrize(
    ("name", "replicas", "freq", "step", "execution"),
    [
        *((name, "two", 4, 9, 1) for name in OPTIMIZERS if name not in LONG),
        *(
            pytest.param(name, "two", 4, 9, 1, marks=pytest.mark.long)
            for name in LONG
        ),
        pytest.param("lamb", "one", 4, 5, 2, marks=pytest.mark.long),
        *(
            pytest.param("dgc", "one", freq, step, 1, marks=pytest.mark.long)
            for freq, step in [(4, 14), ("epoch", 8), (6, 6)]
        ),
    ],
    ids=lambda value: str(value),
)
def test_resumed_training_equals_an_uninterrupted_one(
    tmp_path, strategies, name, freq, step, replicas, execution
):
    """Interrupt after `step` calls, each of `execution` batches."""

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


@pytest.mark.long  # test_local_steps.py ends a restored round before a trace.
def test_round_that_no_step_has_been_traced_of_is_resumed(tmp_path, strategies):
    """The backup follows an epoch's last batch, and a synchronization.

    Only steps show that the gradients of a table are sparse.
    """
    x = np.random.default_rng(0).integers(0, 50, (60, 3))

    def make():
        keras.utils.set_random_seed(1)
        with strategies["two"].scope():
            layers = keras.layers
            model = keras.Sequential(
                [
                    keras.Input((3,), dtype="int32"),
                    layers.Embedding(50, 4),
                    layers.Flatten(),
                    layers.Dense(8),
                ]
            )
            model.compile(OPTIMIZERS["rounds"](), "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    def train(model, folder, *callbacks):
        backup = tfo.callbacks.BackupAndRestore(folder, save_freq=6)
        model.fit(
            *(x, Y),
            batch_size=10,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[backup, *callbacks],
        )
        return state(model)

    expected = train(make(), tmp_path / "a")
    with pytest.raises(Interruption):
        train(make(), tmp_path / "b", Interrupt(6))
    assert_equal(train(make(), tmp_path / "b"), expected)


class Own(keras.Model):
    """Has a second optimizer, in addition to that of `compile`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(8)
        self.optimizers = {"own": keras.optimizers.Adam(0.01)}

    @property
    def own(self):
        return self.optimizers["own"]

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


class OwnLoss(keras.Sequential):
    """Has `compute_loss`, and never builds the loss of `compile`."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean((y - y_pred) ** 2)


@pytest.mark.parametrize("replicas", cases.with_long(["one", "two"], ["two"]))
def test_loss_of_the_model_is_resumed_within_an_epoch(
    tmp_path, strategies, replicas
):
    def make():
        keras.utils.set_random_seed(1)
        with strategies[replicas].scope():
            model = OwnLoss([keras.Input((8,)), keras.layers.Dense(8)])
            model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    model, resumed = make(), make()
    fit(model, tmp_path)
    interrupt(resumed, tmp_path, 9, save_freq=1)
    resumed = make()
    assert epochs_of(fit(resumed, tmp_path, save_freq=1)) == [1, 2]
    assert_equal(resumed.get_weights(), model.get_weights())


def test_optimizers_that_are_not_built_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"Received: `optimizers\['own'\]` of"):
        fit(make_own(build=False), tmp_path)


class Decay(keras.callbacks.Callback):
    """Halves the rate in each epoch, as `LearningRateScheduler` may do."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = (
            0.5 * self.model.optimizer.learning_rate.numpy()
        )


def make_sgd(rate=0.1):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def test_rate_is_not_lowered_twice_in_a_resumed_epoch(tmp_path):
    model = make_sgd()
    fit(model, tmp_path, Decay())
    interrupted = make_sgd()
    with pytest.raises(Interruption):
        fit(interrupted, tmp_path, Decay(), Interrupt(10), save_freq=4)
    resumed = make_sgd()
    fit(resumed, tmp_path, Decay(), save_freq=4)
    assert_equal(state(resumed), state(model))
    assert resumed.optimizer.learning_rate.numpy() == np.float32(0.1 / 8)


@pytest.mark.parametrize("step", [8, 10])
def test_another_rate_of_the_script_is_used(tmp_path, step):
    """The script changes the rate between epochs, or within one."""
    interrupt(make_sgd(), tmp_path, step, save_freq=2)
    resumed = make_sgd(0.025)
    with pytest.warns(UserWarning, match="=0.025, but had set 0.1 before"):
        fit(resumed, tmp_path, save_freq=2)
    assert resumed.optimizer.learning_rate.numpy() == np.float32(0.025)


class Lower(keras.callbacks.Callback):
    """Halves the rate after each epoch, as `ReduceLROnPlateau` may do."""

    def on_epoch_end(self, epoch, logs=None):
        Decay.on_epoch_begin(self, epoch)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_rate_of_an_earlier_fit_is_not_one_of_the_script(
    tmp_path, is_interrupted
):
    """The next `fit`, and a restarted script, continue with its rate."""

    def train(model, epochs, *callbacks):
        model.fit(
            *(X, Y),
            batch_size=10,
            epochs=epochs,
            verbose=0,
            callbacks=[*callbacks[:1], backup, *callbacks[1:]],
        )

    backup = tfo.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    model = make_sgd()
    if is_interrupted:
        with pytest.raises(Interruption):
            train(model, 3, Lower(), Interrupt(8))
    else:
        train(model, 1, Lower())
    for epochs, each in [(2, model), (3, make_sgd()), (4, make_sgd())]:
        train(each, epochs)
        assert each.optimizer.learning_rate.numpy() == np.float32(0.05)


def test_rate_that_the_script_sets_between_fits_is_used(tmp_path):
    model = make_sgd()
    fit(model, tmp_path, Decay(), epochs=2, delete_checkpoint=False)
    model.optimizer.learning_rate = 0.01
    with pytest.warns(UserWarning, match="=0.01, but had set 0.1 before"):
        fit(model, tmp_path)
    assert model.optimizer.learning_rate.numpy() == np.float32(0.01)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("known", cases.with_long([True, False], [True]))
def test_last_execution_of_an_epoch_may_be_short(tmp_path, known):
    """Six batches are executed in groups of four and two."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    if not known:
        data = data.filter(lambda x, y: True)

    def run(folder, *callbacks):
        model = make_sgd()
        model.compile("sgd", "mse", steps_per_execution=4)
        backup = tfo.callbacks.BackupAndRestore(folder, save_freq=4)
        settings = {"epochs": 3, "verbose": 0, "shuffle": False}
        model.fit(data, callbacks=[backup, *callbacks], **settings)
        return model

    expected = run(tmp_path / "a")
    for calls in (1, 2, 3):
        with pytest.raises(Interruption):
            run(tmp_path / "b", Interrupt(calls))
        assert_equal(state(run(tmp_path / "b")), state(expected))


def test_generator_that_yields_none_is_resumed(tmp_path):
    """None stands for sample weights; Keras then draws optionals."""

    def draw():
        while True:
            for i in range(0, 60, 10):
                yield X[i : i + 10], Y[i : i + 10], None

    def run(folder, *callbacks):
        model = make_sgd()
        backup = tfo.callbacks.BackupAndRestore(folder, save_freq=2)
        settings = {"epochs": 2, "steps_per_epoch": 6, "shuffle": False}
        model.fit(draw(), verbose=0, callbacks=[backup, *callbacks], **settings)
        return model

    expected = run(tmp_path / "a")
    with pytest.raises(Interruption):
        run(tmp_path / "b", Interrupt(9))
    assert_equal(state(run(tmp_path / "b")), state(expected))


class StopAt(keras.callbacks.Callback):
    """Ends a `fit` in the middle of an epoch, as at a time limit."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 3


def test_stopped_fit_resumes_in_its_epoch(tmp_path):
    model = make_sgd()
    fit(model, tmp_path / "a")
    stopped = make_sgd()
    fit(stopped, tmp_path / "b", StopAt(), delete_checkpoint=False)
    assert stopped.optimizer.iterations.numpy() == 4
    resumed = make_sgd()
    fit(resumed, tmp_path / "b")
    assert resumed.optimizer.iterations.numpy() == 18
    assert_equal(state(resumed), state(model))


@pytest.mark.parametrize("place", cases.with_long(["layer", "loss"], ["layer"]))
def test_unseeded_random_numbers_continue(tmp_path, place):
    """Keras creates the generator with a layer, or in the first step."""

    def noisy(x):
        return x + keras.random.normal((1, 8))

    def start():
        keras.utils.clear_session()  # Like a new process.
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
def test_bad_argument_is_rejected(kwargs, error, message):
    with pytest.raises(error, match=message):
        tfo.callbacks.BackupAndRestore(**{"backup_dir": "x"} | kwargs)


def test_folder_is_where_the_callback_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = tfo.callbacks.BackupAndRestore("backup", delete_checkpoint=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = np.zeros((2, 1))
    model.fit(data, data, verbose=0, callbacks=[callback])
    assert list((tmp_path / "backup").glob("*.json"))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_unbuilt_model_is_rejected(tmp_path):
    callback = tfo.callbacks.BackupAndRestore(tmp_path)
    callback.set_model(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="must be built"):
        callback.on_train_begin()


def restarted(folder):
    """Return a copy of a folder that no `fit` of this process has used."""
    return shutil.copytree(folder, folder.with_name(f"{folder.name}-again"))


@pytest.mark.filterwarnings("ignore:`fit` restores only backups")
def test_each_of_two_fits_resumes_from_its_own_backup(tmp_path):
    def start(folder, *callbacks):
        model = make_sgd()
        logs = [fit(model, folder, epochs=2, save_freq=4)]
        logs += [fit(model, folder, *callbacks, epochs=3, save_freq=4)]
        return model, logs

    expected, logs = start(tmp_path / "a")
    with pytest.raises(Interruption):
        start(tmp_path / "b", Interrupt(9))
    resumed, found = start(restarted(tmp_path / "b"))
    assert_equal(state(resumed), state(expected))
    assert found == [logs[0], logs[1][1:]]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_backup_of_another_fit_is_kept_with_a_warning(tmp_path):
    model = make_small(tmp_path, 7, save_freq="epoch", name="other")
    with pytest.warns(UserWarning, match="is named 'fit 1'.*name='other'"):
        assert epochs_of(fit(model, tmp_path)) == [0, 1, 2]
    assert epochs_of(fit(model, tmp_path, name="mine")) == [0, 1, 2]
    assert epochs_of(fit(model, tmp_path, name="other")) == [1, 2]
    assert not tmp_path.exists()


def test_damage_of_an_unknown_run_does_not_stop_a_later_fit(tmp_path):
    kwargs = {"double_checkpoint": True}
    model = make_small(tmp_path, 9, **kwargs)
    damaged = sorted(tmp_path.glob("00000002.*"))
    for path in damaged:
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match="00000002.*Restoring backup 00000001"):
        assert epochs_of(fit(model, tmp_path, **kwargs)) == [0, 1, 2]
    assert epochs_of(fit(model, tmp_path, **kwargs)) == [0, 1, 2]
    assert sorted(tmp_path.iterdir()) == damaged
    with pytest.raises(RuntimeError, match="00000002.* another run, move"):
        fit(model, tmp_path, name="mine")


def test_backup_of_an_old_version_is_rejected(tmp_path):
    """Backups of 0.1.0 have no name, and no seeds."""
    model = make_small(tmp_path, 7, save_freq="epoch")
    path = tmp_path / "00000001.json"
    content = json.loads(json.loads(path.read_text())["content"])
    del content["name"], content["seeds"]
    np.savez(tmp_path / "00000001.worker-0.npz")
    text = json.dumps(content)
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, "content": text}))
    with pytest.raises(RuntimeError, match=r"format of tf_optimizers 0\.1, "):
        fit(model, tmp_path, name="mine")
    assert path.exists()


def test_kept_backups_are_resumed_from(tmp_path):
    model = make_small(tmp_path, 0)
    for epochs, expected in [(1, [0]), (3, [1, 2])]:
        found = fit(model, tmp_path, epochs=epochs, delete_checkpoint=False)
        assert epochs_of(found) == expected
    before = model.get_weights()
    with pytest.warns(UserWarning, match="epochs=3, and .* after epoch 3"):
        assert fit(model, tmp_path) == []
    assert_equal(model.get_weights(), before)
    assert not tmp_path.exists()


@pytest.mark.parametrize("epochs", [1, 2])
def test_backup_of_more_epochs_is_kept(tmp_path, epochs):
    """A restart asks for fewer epochs."""
    # After the second batch of the third epoch.
    model = make_small(tmp_path, 14, save_freq=2)
    with pytest.warns(UserWarning, match=f"epochs={epochs}, and a backup"):
        assert fit(model, tmp_path, epochs=epochs) == []
    assert epochs_of(fit(model, tmp_path)) == [2]
    assert not tmp_path.exists()


def test_batches_of_another_size_are_warned_of(tmp_path):
    model = make_small(tmp_path)
    backup = tfo.callbacks.BackupAndRestore(tmp_path)
    with pytest.warns(UserWarning, match="12 batches, and 6 when.* first 4 b"):
        model.fit(X, Y, batch_size=5, callbacks=[backup], verbose=0)


class Scaled(keras.layers.Layer):
    """Has weights that are named like variables of an optimizer."""

    def build(self, _):
        self.rate = self.add_weight(shape=(), name="learning_rate")
        self.sums = self.add_weight(shape=(8,), name="a_gradient_accumulator")

    def call(self, x):
        return x * self.rate + self.sums


@pytest.mark.filterwarnings("ignore:`epochs` must be greater")
@pytest.mark.parametrize("strategy", ["one", "two"])
def test_weights_may_be_called_like_parts_of_an_optimizer(
    tmp_path, strategies, strategy
):
    def make(seed, strategy):
        keras.utils.set_random_seed(seed)
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), Scaled()])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    old = make(0, NONE)
    interrupt(old, tmp_path, 6)
    new = make(1, strategies[strategy])
    fit(new, tmp_path, epochs=1, delete_checkpoint=False)
    assert_equal(new.get_weights(), old.get_weights())


def test_second_fit_starts_at_its_first_epoch(tmp_path):
    model = make_sgd()
    interrupt(model, tmp_path, 7)
    assert epochs_of(fit(model, tmp_path)) == [1, 2]
    assert epochs_of(fit(model, tmp_path, epochs=1)) == [0]
