"""Backups: a training that was interrupted goes on as if nothing had been."""

import errno
import hashlib
import json
import os
import re
import shutil
import warnings

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.callbacks.archive import Archive
from tf_optimizers.callbacks.files import Folder, digest
from tf_optimizers.callbacks.inspection import Inspection
from tf_optimizers.callbacks.state import State
from tf_optimizers.distribute.workers import Workers

X, Y = np.random.default_rng(0).random((2, 60, 8)).astype("float32")
OPTIMIZERS = {
    **{name: case.make for name, case in cases.CASES.items()},
    "dgc": lambda **kwargs: tfo.DGCMomentum(
        0.1, sparsity=(0.9,), min_compress_size=20, **kwargs
    ),
    "keras-adam": keras.optimizers.Adam,
}
WRAPPERS = {
    "alone": lambda optimizer: optimizer,
    "in LossScaleOptimizer": keras.optimizers.LossScaleOptimizer,
    "in MultiOptimizer": lambda optimizer: keras.optimizers.MultiOptimizer(
        lambda variable: optimizer
    ),
}
NONE = tf.distribute.get_strategy()


class Interruption(Exception):
    """What a kill is in here."""


class Interrupt(keras.callbacks.Callback):
    """Raises in a step, counted over all epochs."""

    def __init__(self, step):
        super().__init__()
        self.remaining = step

    def on_train_batch_begin(self, batch, logs=None):
        self.remaining -= 1
        if self.remaining < 0:
            raise Interruption


class Logs(keras.callbacks.Callback):
    """Notes what an epoch reports."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append((epoch, logs))


def make_model(optimizer, strategy=NONE, width=16, **kwargs):
    """Seeds and replicas' own statistics are part of the state."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(width, activation="relu"),
                keras.layers.Dropout(0.5),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(8),
            ]
        )
        model.compile(optimizer(), "mse", metrics=["mae"], **kwargs)
    return model


def fit(model, folder, *callbacks, epochs=3, **kwargs):
    """Return the epochs' logs; six batches each."""
    noted = Logs()
    backup = tfo.callbacks.BackupAndRestore(folder, **kwargs)
    model.fit(
        *(X, Y),
        batch_size=10,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[backup, noted, *callbacks],
    )
    return noted.logs


def epochs_of(logs):
    return [epoch for epoch, _ in logs]


def state(model):
    """Every replica's own values."""
    strategy = model.distribute_strategy
    return [
        cases.as_numpy(part)
        for v in [*model.variables, *model.optimizer.variables]
        for part in strategy.experimental_local_results(v.value)
    ]


def interrupt(model, folder, step, **kwargs):
    with pytest.raises(Interruption):
        fit(model, folder, Interrupt(step), **kwargs)


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def strategies(mirrored):
    return {"one": NONE, "two": mirrored}


@pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic")
@pytest.mark.parametrize(
    ("name", "replicas", "freq", "step", "execution"),
    [
        *((name, "two", 4, 9, 1) for name in OPTIMIZERS),
        ("dgc", "one", "epoch", 8, 1),
        ("dgc", "one", 4, 14, 1),
        ("dgc", "one", 6, 6, 1),
        ("lans", "one", 4, 5, 2),
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

    expected = make()
    logs = fit(expected, tmp_path / "a")
    interrupt(make(), tmp_path / "b", step, save_freq=freq)
    resumed = make()
    found = fit(resumed, tmp_path / "b", save_freq=freq)
    assert_equal(state(resumed), state(expected))
    assert 0 < len(found) < 4
    assert found == logs[-len(found) :]
    assert list(tmp_path.iterdir()) == []


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


def make_archive(
    folder, strategy=NONE, optimizer="dgc", width=16, wrapper="alone", **kwargs
):
    """An archive of a model that has not been trained."""

    def make():
        return WRAPPERS[wrapper](OPTIMIZERS[optimizer](**kwargs))

    model = make_model(make, strategy, width)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    folder = Folder(folder)
    return Archive(folder, State(model), Workers(strategy), 2), model


def scramble(model, seed):
    """Give every replica values of its own where it may have them."""
    rng = np.random.default_rng(seed)
    strategy = model.distribute_strategy
    for v in [*model.variables, *model.optimizer.variables]:
        parts = strategy.experimental_local_results(v.value)
        values = [rng.standard_normal(v.shape) * 10 for _ in parts]
        for part, value in zip(parts, values, strict=True):
            own = "on_read" in str(v.synchronization) or "moving" in v.path
            part.assign(tf.cast(value if own else values[0], v.dtype))


def restore(archive):
    content = archive.newest()
    archive.restore(content, "lasting")
    return content


@pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic")
@pytest.mark.parametrize("old", ["one", "two"])
@pytest.mark.parametrize("new", ["one", "two"])
def test_sums_of_replicas_are_conserved(tmp_path, strategies, old, new):
    source, model = make_archive(tmp_path, strategies[old])
    scramble(model, 0)
    source.save({"epoch": 3, "batch": 2})
    target, other = make_archive(tmp_path, strategies[new])
    content = restore(target)
    assert (content["epoch"], content["batch"]) == (3, 2)
    if old == new:
        assert_equal(state(other), state(model))
    pairs = zip(
        [*model.variables, *model.optimizer.variables],
        [*other.variables, *other.optimizer.variables],
        strict=True,
    )
    for a, b in pairs:
        mine = strategies[new].experimental_local_results(b.value)
        if a.aggregation == "sum":
            parts = strategies[old].experimental_local_results(a.value)
            total = np.sum([p.numpy() for p in parts], 0, dtype="float64")
            found = np.sum([p.numpy() for p in mine], 0, dtype="float64")
            np.testing.assert_allclose(found, total, rtol=2e-7, atol=2e-6)
            assert np.abs(total).max() > 1
        else:
            first = strategies[old].experimental_local_results(a.value)[0]
            np.testing.assert_array_equal(mine[0].numpy(), first.numpy())


@pytest.mark.parametrize(
    "wrapper",
    [
        "alone",
        "in LossScaleOptimizer",
        pytest.param("in MultiOptimizer", marks=cases.needs_groups),
    ],
)
@pytest.mark.parametrize("name", ["lamb", "adam_offload"])
@pytest.mark.parametrize("old", ["one", "two"])
def test_accumulated_gradients_are_conserved(
    tmp_path, strategies, name, old, wrapper
):
    """Each replica has a share of them, but the host the sum."""

    def accumulating(strategy):
        archive, model = make_archive(
            *(tmp_path, strategy, name),
            wrapper=wrapper,
            gradient_accumulation_steps=2,
        )
        variable = next(
            v for v in model.optimizer.variables if "accumulator" in v.path
        )
        return archive, strategy.experimental_local_results(variable.value)

    new = {"one": "two", "two": "one"}[old]
    source, parts = accumulating(strategies[old])
    for i, part in enumerate(parts):
        part.assign(tf.fill(part.shape, 2.0 + i))
    source.save({"epoch": 1, "batch": 3})
    target, others = accumulating(strategies[new])
    restore(target)
    total = sum(part.numpy() for part in parts)
    np.testing.assert_array_equal(sum(p.numpy() for p in others), total)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated": truncate,
    "flipped bit": flip,
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("file", ["json", "worker-0.npz"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_backup_is_not_used(tmp_path, file, damage):
    archive, model = make_archive(tmp_path, optimizer="lamb")
    archive.save({"epoch": 1, "batch": 0})
    before = state(model)
    scramble(model, 1)
    archive.save({"epoch": 2, "batch": 0})
    DAMAGE[damage](tmp_path / f"00000002.{file}")
    if (damage, file) == ("missing", "json"):  # It was never complete.
        assert restore(archive)["epoch"] == 1
        return
    with pytest.warns(UserWarning, match="00000002.*The one before it is used"):
        content = restore(archive)
    assert content["epoch"] == 1
    assert_equal(state(model), before)
    archive.save({"epoch": 3, "batch": 0})
    assert Folder(tmp_path).generations() == [3, 1]
    DAMAGE[damage](tmp_path / f"00000003.{file}")
    DAMAGE[damage](tmp_path / f"00000001.{file}")
    with pytest.raises(RuntimeError, match="00000001.*start anew"):
        archive.newest()


def test_backup_holds_no_code(tmp_path):
    """What pickles is refused by the reader, whatever its checksum."""
    archive, _ = make_archive(tmp_path, optimizer="lamb")
    archive.save({"epoch": 1, "batch": 0})
    part = tmp_path / "00000001.worker-0.npz"
    np.savez(part, **{"lasting.0": np.array([print], dtype=object)})
    content = Folder(tmp_path).content(1) | {"parts": [digest(part)]}
    Folder(tmp_path).commit(1, content)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        restore(archive)


def test_backup_that_cannot_be_written_leaves_the_one_before(
    tmp_path, monkeypatch
):
    archive, model = make_archive(tmp_path, optimizer="lamb")
    archive.save({"epoch": 1, "batch": 0})
    before = sorted(tmp_path.iterdir())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RuntimeError, match=r"No space left .*worker 0"):
            archive.save({"epoch": 2, "batch": 0})
    assert sorted(tmp_path.iterdir()) == before
    assert archive.newest()["epoch"] == 1


def test_folder_of_each_worker_alone_is_refused(tmp_path, monkeypatch):
    archive, _ = make_archive(tmp_path, optimizer="lamb")
    monkeypatch.setattr(Folder, "sees", lambda *_: False)
    with pytest.raises(RuntimeError, match="all workers share.*worker 0 does"):
        archive.check_shared()
    assert list(tmp_path.iterdir()) == []


def test_stock_strategy_of_several_workers_is_refused():
    with pytest.raises(TypeError, match="SparseMultiWorkerMirroredStrategy"):
        Workers(tf.distribute.MultiWorkerMirroredStrategy())


@pytest.mark.parametrize("kept", [1, 2])
def test_older_backups_are_deleted(tmp_path, kept):
    (tmp_path / "notes.txt").write_text("mine")
    archive, model = make_archive(tmp_path, optimizer="lamb")
    archive = Archive(Folder(tmp_path), State(model), Workers(NONE), kept)
    (tmp_path / "00000001.worker-0.npz.partial").write_bytes(b"killed")
    for epoch in range(4):
        archive.save({"epoch": epoch, "batch": 0})
        assert archive.newest()["epoch"] == epoch
    assert Folder(tmp_path).generations() == [4, 3][:kept]
    assert len(list(tmp_path.iterdir())) == 1 + 2 * kept
    archive.delete()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"optimizer": "lans"}, "optimizer is LANS here, and Lamb"),
        ({"width": 5}, r"dense_\d*/?kernel is .*8, 5.*8, 16|kernel is"),
    ],
    ids=["optimizer", "shape"],
)
def test_backup_of_another_training_is_refused(tmp_path, kwargs, message):
    make_archive(tmp_path, optimizer="lamb")[0].save({"epoch": 1, "batch": 0})
    archive, model = make_archive(tmp_path, **{"optimizer": "lamb"} | kwargs)
    before = state(model)
    with pytest.raises(ValueError, match=message):
        restore(archive)
    assert_equal(state(model), before)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "part",
    ["dense.*/kernel", "moving_variance", "dense.*_velocity"],
    ids=["weight", "statistics", "slot"],
)
def test_what_is_not_finite_is_not_backed_up(tmp_path, mirrored, part, value):
    """Wherever it is; here on one replica where replicas differ."""
    archive, model = make_archive(tmp_path, mirrored, optimizer="lamb")
    archive.save({"epoch": 1, "batch": 0})
    variable = next(
        v
        for v in [*model.variables, *model.optimizer.variables]
        if re.search(part, v.path)
    )
    last = mirrored.experimental_local_results(variable.value)[-1]
    last.assign(tf.fill(last.shape, value))
    with pytest.raises(RuntimeError, match=f"must be finite.*{part}"):
        archive.save({"epoch": 2, "batch": 0})
    assert archive.newest()["epoch"] == 1


def test_frozen_weight_that_becomes_nan_is_not_backed_up(tmp_path):
    archive, model = make_archive(tmp_path, optimizer="lamb")
    model.layers[0].trainable = False
    model.weights[0].assign(tf.fill(model.weights[0].shape, np.nan))
    with pytest.raises(RuntimeError, match="must be finite.*dense.*/kernel"):
        archive.save({"epoch": 2, "batch": 0})


class Mask(keras.layers.Layer):
    """Has a variable that is -inf because it is meant to be."""

    def build(self, shape):
        self.mask = self.add_weight(
            shape=(2,),
            initializer=lambda shape, dtype: tf.constant([0, -np.inf], dtype),
            trainable=False,
            name="mask",
        )

    def call(self, x):
        return x


class Spoil(keras.callbacks.Callback):
    """Assigns to a layer's first weight in a step, counted over all epochs."""

    def __init__(self, step, layer, value):
        super().__init__()
        self.remaining, self.layer, self.value = step, layer, value

    def on_train_batch_begin(self, batch, logs=None):
        self.remaining -= 1
        if self.remaining < 0:
            weight = self.model.layers[self.layer].weights[0]
            weight.assign(keras.ops.full(weight.shape, self.value))


@pytest.mark.parametrize(("freq", "kept"), [(4, 1), (20, 0)])
def test_last_good_backup_outlives_a_training_that_diverged(
    tmp_path, freq, kept
):
    """`TerminateOnNaN` ends it between two backups, or before the first."""
    model = make_model(OPTIMIZERS["lamb"])
    spoil, stop = Spoil(5, -1, np.nan), keras.callbacks.TerminateOnNaN()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, tmp_path / "backup", spoil, stop, save_freq=freq)
    assert model.stop_training
    said = [str(w.message) for w in caught if "backup" in str(w.message)]
    assert len(said) == kept
    if kept:
        assert re.search("NaN or inf in .*dense.*/kernel.*00000001", said[0])
        found = fit(make_model(OPTIMIZERS["lamb"]), tmp_path / "backup")
        assert epochs_of(found) == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []


def test_inf_is_backed_up_where_it_was_when_the_training_began(tmp_path):
    def make():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(8), Mask()]
        )
        model.compile("sgd", "mse")
        return model

    interrupt(make(), tmp_path, 3, save_freq=2)
    fit(make(), tmp_path, save_freq=2, epochs=1)
    spoil = Spoil(1, layer=1, value=np.nan)
    with pytest.raises(RuntimeError, match="must be finite.*mask"):
        fit(make(), tmp_path, spoil, save_freq=2)


def test_what_is_not_finite_on_one_worker_is_told_on_all(monkeypatch):
    model = make_model(OPTIMIZERS["lamb"])
    state, workers = State(model), Workers(NONE)
    inspection = Inspection(state, workers)
    assert inspection.not_finite(state.values()) is None
    monkeypatch.setattr(workers, "gather", lambda mine: [mine, 3, 2])
    expected = state.sections["lasting"][2].path
    assert inspection.not_finite(state.values()) == expected
    model.variables[1].assign(model.variables[1] * np.nan)
    assert inspection.not_finite(state.values()) == model.variables[1].path


def test_weights_that_parted_are_not_backed_up(tmp_path, mirrored):
    archive, model = make_archive(tmp_path, mirrored, optimizer="lamb")
    part = mirrored.experimental_local_results(model.weights[0].value)[1]
    part.assign_add(tf.fill(part.shape, 1e-7))
    with pytest.raises(RuntimeError, match="the same on all replicas"):
        archive.save({"epoch": 1, "batch": 0})
    assert list(tmp_path.iterdir()) == []


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
        ({"name": 1}, TypeError, "`name` must be a word.*name=1"),
        ({"name": ""}, ValueError, "`name` must be a word.*name=''"),
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


def make_small(folder, step=4, save_freq=4, **kwargs):
    """A model with a backup, in the middle of an epoch of six batches."""

    def make():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    interrupt(make(), folder, step, save_freq=save_freq, **kwargs)
    return make()


def fit_alone(model):
    """Return how many steps a `fit` without a backup makes, of six."""
    before = int(model.optimizer.iterations.numpy())
    model.fit(X, Y, batch_size=10, verbose=0)
    return int(model.optimizer.iterations.numpy()) - before


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_epoch_of_fewer_batches_than_the_backup_has_seen_is_refused(
    tmp_path, known
):
    model = make_small(tmp_path)
    before = model.get_weights()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(20)
    if not known:
        data = data.filter(lambda x, y: True)
    with pytest.raises(ValueError, match="Received: 3 batches.*after 4"):
        model.fit(
            data,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[tfo.callbacks.BackupAndRestore(tmp_path)],
        )
    if known:
        assert_equal(model.get_weights(), before)
    assert fit_alone(model) == 6
    assert epochs_of(fit(model, tmp_path)) == [0, 1, 2]


def test_all_workers_refuse_what_is_too_short_for_one(tmp_path, monkeypatch):
    model = make_small(tmp_path)
    monkeypatch.setattr(
        *(Workers, "gather"), lambda _, mine: [mine, 3 if mine == 6 else mine]
    )
    with pytest.raises(ValueError, match="Received: 3 batches.*after 4"):
        fit(model, tmp_path)


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_skipping_does_not_outlive_a_fit_that_raises(tmp_path, step, compiled):
    model = make_small(tmp_path)
    interrupt(model, tmp_path, step)
    if compiled:
        model.compile(keras.optimizers.SGD(0.1), "mse")
    assert fit_alone(model) == 6
    interrupt(model, tmp_path, step)
    before = model.get_weights()
    model.train_on_batch(X, Y)
    assert (model.get_weights()[0] != before[0]).any()


def test_skipping_does_not_outlive_it_in_the_callback(tmp_path):
    model = make_small(tmp_path / "backup")
    backup = tfo.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(Interruption):
        model.fit(X, Y, 10, verbose=0, callbacks=[backup, Interrupt(2)])
    shutil.rmtree(tmp_path / "backup")
    model.fit(X, Y, 10, verbose=0, callbacks=[backup])
    assert model.optimizer.iterations.numpy() == 4 + 6


class Fail(keras.callbacks.Callback):
    """Raises before the first epoch."""

    def on_train_begin(self, logs=None):
        raise Interruption


def test_epochs_left_out_do_not_outlive_a_fit_that_raises(tmp_path):
    model = make_small(tmp_path, 7, save_freq="epoch")
    with pytest.raises(Interruption):
        fit(model, tmp_path, Fail())
    assert fit_alone(model) == 6


class Stop(keras.callbacks.Callback):
    """Ends the training with its first batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


def test_skipping_does_not_outlive_a_fit_that_is_stopped(tmp_path):
    model = make_small(tmp_path)
    fit(model, tmp_path, Stop(), delete_checkpoint=False)
    assert fit_alone(model) == 6
    (path,) = tmp_path.glob("*.json")
    content = Folder(tmp_path).content(int(path.stem))
    assert (content["epoch"], content["batch"]) == (0, 4)


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
    with pytest.warns(UserWarning, match="epochs=3, and a backup after 3"):
        assert fit(model, tmp_path) == []
    assert_equal(model.get_weights(), before)


def test_second_fit_starts_at_its_first_epoch(tmp_path):
    model = make_model(OPTIMIZERS["lamb"])
    interrupt(model, tmp_path, 7)
    assert epochs_of(fit(model, tmp_path)) == [1, 2]
    assert epochs_of(fit(model, tmp_path, epochs=1)) == [0]
