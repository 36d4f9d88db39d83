"""TensorFlow's strategies and ours give optimizers the same answers."""

import json
import warnings

import devices
import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.codes.entries import Entries
from tf_optimizers.replicas import replicas_of, warn_if_alone


def ask(strategy):
    """Return the results on both replicas, as arrays."""

    @tf.function(autograph=False)
    def step():
        group = replicas_of()
        own = tf.constant([[1.0, 2.0], [10.0, 20.0]])[group.rank]
        position = tf.constant([[0], [3]])[group.rank]
        every, total = group.gather_and_sum(
            [Entries(own[:1], position, 4), own]
        )
        first, second = group.sum_at_owners([own, 2 * own], [1, 0])
        summed = [second, first][group.rank]  # At the owner of the value.
        first, second = group.gather_from_owners([own, 2 * own], [1, 0])
        return {
            "rank": tf.constant(group.rank),
            "count": tf.constant(group.count),
            "entries": tf.scatter_nd(every.indices[:, None], every.values, [4]),
            "total": total,
            "on the worker": group.sum_on_worker([own])[0],
            "at owners": summed,
            "of owners": tf.stack([first, second]),
        }

    with strategy.scope():
        results = strategy.run(step)
    local = strategy.experimental_local_results
    return {key: np.stack(local(results[key])).tolist() for key in results}


@pytest.fixture(params=["TensorFlow's", "ours"])
def strategy(request):
    if request.param == "ours":
        return devices.on_cpus()
    return request.getfixturevalue("mirrored")


def test_replicas_answer_the_same(strategy):
    assert ask(strategy) == {
        "rank": [0, 1],
        "count": [2, 2],
        "entries": [[1.0, 0.0, 0.0, 10.0]] * 2,
        "total": [[11.0, 22.0]] * 2,
        "on the worker": [[11.0, 22.0]] * 2,
        "at owners": [[22.0, 44.0], [11.0, 22.0]],
        "of owners": [[[10.0, 20.0], [2.0, 4.0]]] * 2,
    }
    group = replicas_of(strategy)
    assert (group.worker, group.workers, len(group.devices)) == (0, 1, 2)
    assert group.agree("a subject", [3]) == [[3]]


def step(folder):
    variable = keras.Variable([1.0])
    tfo.Lamb().apply([tf.ones([1])], [variable])


def back_up(folder):
    fit(tfo.callbacks.BackupAndRestore(folder / "backup"))


def track(folder):
    fit(tfo.callbacks.ChiefOnly(keras.callbacks.Callback()))


def fit(callback):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(*np.ones((2, 4, 1)), verbose=0, callbacks=[callback])


@pytest.fixture
def warned(monkeypatch, tmp_path):
    """Return a function that acts with a `TF_CONFIG`; return the warnings."""

    def warned(act, text):
        monkeypatch.setenv("TF_CONFIG", text)
        warn_if_alone.cache_clear()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            act(tmp_path)
        return [w for w in found if "must train under one" in str(w.message)]

    yield warned
    warn_if_alone.cache_clear()


def config(job="worker", **cluster):
    task = {"type": job, "index": 0}
    return json.dumps({"cluster": cluster, "task": task})


@pytest.mark.parametrize("act", [step, back_up, track])
def test_worker_that_trains_alone_is_warned(warned, act):
    (warning,) = warned(act, config(chief=["a:1"], worker=["b:1", "c:1"]))
    assert "Received: 3 workers, but no multi-worker strategy" in str(
        warning.message
    )


def load_and_predict(folder):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(tfo.Lamb(), "mse")
    model.optimizer.build(model.trainable_variables)
    model.save(folder / "model.keras")
    model = keras.saving.load_model(folder / "model.keras")
    model.predict(np.ones((4, 1)), verbose=0)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (load_and_predict, config(worker=["a:1", "b:1"])),
        (step, config("evaluator", worker=["a:1", "b:1"])),
        (step, config(worker=["a:1"])),
        (step, "{}"),
        (step, "not JSON"),
        (step, '{"cluster": [], "task": []}'),
    ],
)
def test_process_that_may_be_alone_is_not_warned(warned, act, text):
    assert warned(act, text) == []
