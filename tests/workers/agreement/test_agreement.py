"""Workers that do not answer, die, or are at another place."""

import functools
import gc
import itertools
import json
import re
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.workers import worker_replicas
from tf_optimizers.workers.agreement import same_training as same_optimizer
from tf_optimizers.workers.agreement import statements as agreement
from tf_optimizers.workers.agreement import watchdog

TASKS = [f"/job:worker/replica:0/task:{i}" for i in range(3)]


class Store:
    """Stands in for TensorFlow's store, with a clock that waiting moves."""

    def __init__(self):
        self.now, self.notes, self.asked = 0.0, {}, []
        self.dead, self.met = set(), []

    def write(self, key, text):
        self.notes[key] = text

    def read(self, key, timeout):
        if key not in self.notes:
            self.now += timeout
        return self.notes.get(key)

    def delete(self, place):
        for key in [key for key in self.notes if key.startswith(place + "/")]:
            del self.notes[key]

    def check_alive(self, task, timeout):
        self.asked.append(task)
        if task in self.dead:
            raise tf.errors.UnavailableError(None, None, f"{task} is gone")

    def meet(self, key, timeout):
        self.met.append(key)


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(agreement, "coordination", store)
    monkeypatch.setattr(watchdog, "coordination", store)
    monkeypatch.setattr(agreement, "_serial", itertools.count())
    monkeypatch.setattr(agreement.time, "monotonic", lambda: store.now)
    return store


def gather(worker=0, timeout=30.0):
    channels = [
        types.SimpleNamespace(progress=lambda n=number: [[n, 1, 5, 0, 0]] * 2)
        for number in (7, 3)
    ]
    extended = types.SimpleNamespace(
        workers=len(TASKS),
        worker_index=worker,
        tasks=TASKS,
        channels=channels,
        number=1,
    )
    strategy = types.SimpleNamespace(
        extended=extended, agreement_seconds=timeout
    )
    return agreement.gather_statements(strategy, "lunch", "soup", "Eat.")


def say(store, worker, statement, subject="lunch", serial=0):
    note = json.dumps([subject, statement])
    store.write(f"tf_optimizers/{serial}/{worker}", note)


def test_all_statements_are_gathered(store):
    say(store, 1, "rice")
    say(store, 2, ["figs"])
    assert gather() == ["soup", "rice", ["figs"]]
    assert store.asked == []


def test_silent_workers_are_named(store):
    message = r"lunch. Received nothing from worker 1, worker 2 within 30 s"
    with pytest.raises(RuntimeError, match=f"{message}. Eat."):
        gather()
    assert 30 <= store.now < 31
    assert TASKS[0] not in store.asked


@pytest.mark.parametrize("worker", [0, 2])
def test_worker_that_waits_elsewhere_is_noticed(store, worker):
    """It may have run out of data; its watchdog has published its position."""
    late = 0 if worker else 1
    store.write(f"tf_optimizers/watchdog/1/2/4/{late}", "[4, 1, 5, 0]")
    say(store, 2, "rice")
    message = f"nothing from worker {late} (waiting in another exchange). Eat"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        gather(worker, timeout=1800.0)
    assert store.now <= 10


@pytest.mark.filterwarnings("ignore:Waiting")
def test_steps_that_exchange_nothing_do_not_count(store):
    store.write("tf_optimizers/watchdog/1/0/8/1", "[8, 1, 5, 0]")
    store.write("tf_optimizers/watchdog/1/2/3/1", "[3, 1, 5, 0]")
    with pytest.raises(RuntimeError, match="within 90 s"):
        gather(timeout=90.0)


@pytest.mark.filterwarnings("ignore:Waiting")
def test_dead_worker_is_noticed(store):
    store.dead.add(TASKS[2])
    say(store, 1, "rice")
    with pytest.raises(tf.errors.UnavailableError, match="task:2"):
        gather(timeout=1800.0)
    assert store.now <= 10


def test_first_worker_that_accepts_no_note_is_noticed(store):
    """A write to the store of a stopped worker does not end."""
    is_back, written = threading.Event(), []
    store.write = lambda *note: is_back.wait(20) and written.append(note)
    store.dead.add(TASKS[0])
    threading.Timer(5, is_back.set).start()
    with pytest.raises(tf.errors.UnavailableError, match="task:0"):
        gather(worker=2)
    assert not written


def test_long_wait_is_reported(store):
    say(store, 1, "rice")
    with (
        pytest.warns(UserWarning, match="for worker 2 to reach lunch. Eat."),
        pytest.raises(RuntimeError),
    ):
        gather(timeout=90.0)


def test_worker_at_another_place_is_named(store):
    say(store, 1, "rice")
    say(store, 2, "figs", subject="supper")
    with pytest.raises(RuntimeError, match="worker 2 has reached supper"):
        gather()


def test_workers_synchronize_before_a_common_error(store):
    """TensorFlow allows only one barrier per name."""
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size=1 on worker 0, size=2"):
            agreement.check_equal("lunch", [{"size": 1}, {"size": 2}])
    assert len(set(store.met)) == 2


def test_first_worker_informs_the_others(store):
    say(store, 0, "soup")
    notes = [json.dumps(["lunch", what]) for what in ("soup", "rice", "figs")]
    store.write("tf_optimizers/0/all", json.dumps(notes))
    assert gather(worker=2) == ["soup", "rice", "figs"]


@pytest.mark.parametrize("is_there", [False, True])
def test_first_worker_is_named(store, is_there):
    """It has not arrived, or has not answered.

    In the second case it may have been late, and waits for others itself.
    """
    if is_there:
        say(store, 0, "soup")
    with pytest.raises(RuntimeError, match="nothing from worker 0 within 30 s"):
        gather(worker=2)
    late = 40 if is_there else 0
    assert 30 + late <= store.now <= 36 + late


def test_messages_do_not_pile_up(store):
    for serial in range(5):
        for worker in (1, 2):
            say(store, worker, serial, serial=serial)
        gather()
    assert all(key.startswith("tf_optimizers/4/") for key in store.notes)


def test_timeout_of_collectives_is_not_that_of_agreements(store, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    options = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=5.0
    )
    alone = tfo.SparseMultiWorkerMirroredStrategy(communication_options=options)
    monkeypatch.setattr(type(alone.extended), "workers", 2)
    monkeypatch.setattr(type(alone.extended), "tasks", TASKS[:2])
    monkeypatch.setattr(agreement, "_PATIENCE_SECONDS", 3600.0)
    with pytest.raises(RuntimeError, match="from worker 1 within 1800 s"):
        agreement.gather_statements(alone, "lunch", "soup")
    alone.agreement_seconds = 7.0
    gather = functools.partial(agreement.gather_statements, alone, "lunch")
    with pytest.raises(RuntimeError, match="from worker 1 within 7 s"):
        tf.function(gather, autograph=False)("soup")


class Several(tfo.Lamb):
    """Stands in for an optimizer of this package that contains others."""

    def get_config(self):
        parts = [keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1)]
        parts = list(map(keras.optimizers.serialize, parts))
        return super().get_config() | {"optimizers": parts, "name": self.name}


def test_names_of_optimizers_count_on_and_are_not_compared():
    settings = [same_optimizer._settings(Several(0.1)) for _ in range(2)]
    assert settings[0] == settings[1]
    assert settings[0]["optimizers"][0]["config"]["beta_1"] == 0.9


def test_settings_of_keras_optimizers_are_not_compared():
    """The `get_config` of a user's optimizer may fail, or warn."""
    adam = keras.optimizers.Adam()
    assert same_optimizer._settings(adam) == {}
    scaled = keras.optimizers.LossScaleOptimizer(tfo.Lamb(0.1))
    assert same_optimizer._settings(scaled) == {}


@pytest.mark.filterwarnings("ignore:.* saves traffic")
@pytest.mark.parametrize(
    ("make", "compared"),
    [
        (lambda: keras.optimizers.Adam(), ["Adam"]),
        (lambda: tfo.Lamb(0.1), ["Lamb"]),
        (lambda: tfo.SparseLoCo(tfo.Lamb(0.1)), ["SparseLoCo"]),
        (
            lambda: tfo.ShardedState(keras.optimizers.AdamW()),
            ["ShardedState"],
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(tfo.Lamb(0.1)),
            ["LossScaleOptimizer", "Lamb"],
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam()
            ),
            ["LossScaleOptimizer"],
        ),
    ],
    ids=["keras", "ours", "local", "sharded", "scaled", "keras, scaled"],
)
def test_first_step_compares_an_optimizer_once(make, compared, monkeypatch):
    """Further steps, and steps that are traced again, compare nothing."""
    seen = []
    monkeypatch.setattr(
        worker_replicas,
        "check_same_optimizer",
        lambda _, optimizer, __: seen.append(type(optimizer).__name__),
    )
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = make()

    for _ in range(2):

        @tf.function
        def step():
            optimizer.apply([tf.ones(2)], [weight])

        strategy.run(step)
        strategy.run(step)
    assert seen == compared


@pytest.mark.filterwarnings("ignore:.* saves traffic")
def test_step_can_be_called_once_another_models_optimizer_is_deleted(ours):
    """Other models may be deleted after the step has been traced."""
    with ours.scope():
        weights = [keras.Variable([1.0, 2.0]) for _ in range(2)]
        others = [tfo.SparseLoCo(keras.optimizers.SGD(), sync_every=2)]
        others[0].build(weights[1:])
        optimizer = keras.optimizers.SGD(0.25)

    @tf.function
    def step():
        ours.run(lambda: optimizer.apply([tf.ones(2)], weights[:1]))

    traced = step.get_concrete_function()
    others.clear()
    gc.collect()
    with tf.GradientTape():  # A call asks for the variables under a tape.
        traced()
    np.testing.assert_array_equal(weights[0], [0.5, 1.5])
