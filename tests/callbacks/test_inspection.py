"""Variables that are not finite, or differ between replicas, are not saved."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from backups import (
    NONE,
    OPTIMIZERS,
    epochs_of,
    fit,
    interrupt,
    make_archive,
    make_model,
)

from tf_optimizers.callbacks.backup.backup_checks import find_not_finite
from tf_optimizers.callbacks.backup.state import State
from tf_optimizers.replicas import replicas_of


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "part",
    ["dense.*/kernel", "moving_variance", "dense.*_velocity"],
    ids=["weight", "statistics", "slot"],
)
def test_values_that_are_not_finite_are_not_backed_up(
    tmp_path, mirrored, part, value
):
    """The value may be in any variable; here, on one replica."""
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


class Mask(keras.layers.Layer):
    """Has a variable that is -inf intentionally."""

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


def test_inf_from_the_start_is_backed_up(tmp_path):
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


def test_not_finite_on_one_worker_is_an_error_on_all(monkeypatch):
    model = make_model(OPTIMIZERS["lamb"])
    state, group = State(model), replicas_of(NONE)
    assert find_not_finite(state, state.values(), group) is None
    monkeypatch.setattr(group, "agree", lambda _, mine, hint: [mine, 3, 2])
    expected = state.sections["lasting"][2].path
    assert find_not_finite(state, state.values(), group) == expected
    model.variables[1].assign(model.variables[1] * np.nan)
    found = find_not_finite(state, state.values(), group)
    assert found == model.variables[1].path


def test_diverged_weights_are_not_backed_up(tmp_path, mirrored):
    archive, model = make_archive(tmp_path, mirrored, optimizer="lamb")
    part = mirrored.experimental_local_results(model.weights[0].value)[1]
    part.assign_add(tf.fill(part.shape, 1e-7))
    with pytest.raises(RuntimeError, match="the same on all replicas"):
        archive.save({"epoch": 1, "batch": 0})
    assert list(tmp_path.iterdir()) == []
