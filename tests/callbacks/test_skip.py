"""Batches and epochs before a backup are skipped, once."""

import shutil

import keras
import pytest
import tensorflow as tf
from arrays import assert_equal
from backups import (
    Interrupt,
    Interruption,
    X,
    Y,
    epochs_of,
    fit,
    fit_alone,
    interrupt,
    make_model,
    make_small,
)

import tf_optimizers as tfo
from tf_optimizers.callbacks.backup.files import Folder
from tf_optimizers.replicas import ReplicaGroup


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_epoch_of_fewer_batches_than_the_backup_has_seen_is_rejected(
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


def test_all_workers_reject_data_too_short_for_one(tmp_path, monkeypatch):
    model = make_small(tmp_path)
    monkeypatch.setattr(
        *(ReplicaGroup, "agree"),
        lambda _, subject, mine, hint: [mine, 3 if mine == 6 else mine],
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


def test_skipping_does_not_outlive_a_fit_in_the_callback(tmp_path):
    model = make_small(tmp_path / "backup")
    backup = tfo.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(Interruption):
        model.fit(X, Y, 10, verbose=0, callbacks=[backup, Interrupt(2)])
    shutil.rmtree(tmp_path / "backup")
    model.fit(X, Y, 10, verbose=0, callbacks=[backup])
    assert model.optimizer.iterations.numpy() == 4 + 6


class Fail(keras.callbacks.Callback):
    """Raises an error before the first epoch."""

    def on_train_begin(self, logs=None):
        raise Interruption


def test_skipped_epochs_do_not_outlive_a_fit_that_raises(tmp_path):
    model = make_small(tmp_path, 7, save_freq="epoch")
    with pytest.raises(Interruption):
        fit(model, tmp_path, Fail())
    assert fit_alone(model) == 6


class Shrink(keras.callbacks.Callback):
    """Changes the weights after each batch."""

    def on_train_batch_end(self, batch, logs=None):
        for weight in self.model.trainable_weights:
            weight.assign(0.9 * weight)


@pytest.mark.parametrize("place", [0, 1], ids=["before", "after"])
def test_weights_that_a_callback_changes_are_resumed(tmp_path, place):
    """It changes them for skipped batches, too."""

    def train(model, name, *callbacks):
        backup = tfo.callbacks.BackupAndRestore(tmp_path / name, save_freq=2)
        callbacks = [backup, *callbacks]
        callbacks.insert(place, Shrink())
        keywords = {"shuffle": False, "verbose": 0, "callbacks": callbacks}
        model.fit(X, Y, 10, epochs=2, **keywords)
        return model.get_weights()

    sgd = keras.optimizers.SGD
    expected = train(make_model(sgd), "a")
    with pytest.raises(Interruption):
        train(make_model(sgd), "b", Interrupt(9))
    assert_equal(train(make_model(sgd), "b"), expected)


class Stop(keras.callbacks.Callback):
    """Ends the training after its first batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


def test_skipping_does_not_outlive_a_fit_that_is_stopped(tmp_path):
    model = make_small(tmp_path)
    fit(model, tmp_path, Stop(), delete_checkpoint=False)
    assert fit_alone(model) == 6
    (path,) = tmp_path.glob("*.json")
    content = Folder(tmp_path).content(int(path.stem))
    assert (content["epoch"], content["batch"]) == (0, 4)
