"""The simulation of local steps takes the steps of `tfo.SparseLoCo`."""

import json
import pathlib
import re

import keras
import local_schedule
import local_simulation
import numpy as np
import pytest
import run_bytes
import seeds
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.compression.sparsity_schedule import SparsitySchedule

PEAK, STEPS, ROWS = 0.05, 12, 8
SETTINGS = {
    "sync_every": 3,
    "outer_learning_rate": 1.4,
    "residual_decay": 0.9,
    "sparsity": (0.5, 0.75),
    "rampup_step": 12,
    "value_dtype": "int4",
}


def network():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(30, activation="tanh"),
            keras.layers.Dense(20, activation="tanh"),
            keras.layers.Dense(5),
        ]
    )


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS, ROWS, 6)).astype("float32")
    return list(zip(x, rng.integers(5, size=(STEPS, ROWS)), strict=True))


def trained_by_the_package(strategy, settings, name):
    """Return the weights after a run under a strategy of two replicas."""
    with strategy.scope():
        model = network()
        schedule = local_simulation.WarmupThenDecay()
        schedule.set(PEAK, STEPS)
        inner = local_simulation.make_inner(name, schedule, model)
        optimizer = tfo.SparseLoCo(inner, min_compress_size=1, **settings)
        optimizer.build(model.trainable_variables)
    variables, share = model.trainable_variables, ROWS // 2

    def replica(x, y):
        context = tf.distribute.get_replica_context()
        first = context.replica_id_in_sync_group * share
        rows = slice(first, first + share)
        with tf.GradientTape() as tape:
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(
                y[rows], model(x[rows])
            )
            loss = tf.reduce_mean(loss) / 2
        values = [variable.value for variable in variables]
        optimizer.apply(tape.gradient(loss, values), variables)

    step = tf.function(lambda x, y: strategy.run(replica, (x, y)))
    for x, y in data():
        step(tf.constant(x), tf.constant(y))
    return model.get_weights()


@pytest.mark.parametrize(
    "inner, step_ahead", [("AdamW", 0.0), ("AdamW", 0.25), ("Muon", 0.25)]
)
def test_simulation_takes_the_steps_of_the_package(mirrored, inner, step_ahead):
    settings = SETTINGS | {"step_ahead": step_ahead}
    model = network()
    first = model.get_weights()
    simulation = local_simulation.Simulation(model, 2, inner)
    simulation.train(first, data(), PEAK, **settings)
    found = model.get_weights()
    wanted = trained_by_the_package(mirrored, settings, inner)
    for start, one, other in zip(first, found, wanted, strict=True):
        assert np.max(np.abs(one - start)) > 0.1
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_workers_may_begin_a_round_ahead():
    """With all of their unsent movement, their mean is not held back."""
    settings = {"sparsity": (0.5,), "step_ahead": 1.0}
    exchange = local_simulation.Exchange(2, settings)
    common, begun = [np.zeros(4, "float32")], [np.zeros((2, 4), "float32")]
    for step in range(3):
        own = begun[0] + np.random.default_rng(step).normal(size=(2, 4))
        own = tf.constant(own, tf.float32)
        common, begun = exchange(common, begun, [own], step)
        np.testing.assert_allclose(begun[0].mean(0), own.numpy().mean(0), 1e-5)
        assert np.abs(begun[0] - common[0]).max() > 0.1


@pytest.mark.parametrize("shape", ["flat", "early", "late"])
@pytest.mark.parametrize("every", local_schedule.ROUNDS)
def test_candidates_send_as_many_bytes_as_they_say(every, shape):
    found = local_schedule.Candidate(every, shape=shape).arguments(3240)
    assert local_schedule.times_fewer(found, 3240) == pytest.approx(
        1000, rel=0.01
    )


@pytest.mark.parametrize("every", run_bytes.ROUNDS)
def test_recommended_rounds_send_a_thousandth_of_the_bytes(every):
    for steps in (3268, 100_000):
        found = run_bytes.local_steps(steps, every)
        fewer = steps * 4 * run_bytes.SIZE / found["bytes"]
        assert fewer == pytest.approx(1000, rel=0.01)


def test_last_round_is_counted_if_the_run_ends_within_it():
    schedule = SparsitySchedule((0.9,))
    sent = [
        run_bytes.bytes_of(schedule, steps, "int4", 8) for steps in (16, 17, 24)
    ]
    assert sent[1] == sent[2] == 3 * sent[0] / 2


def test_page_shows_the_results():
    root = pathlib.Path(__file__).parents[2]
    page = (root / "docs" / "sparse_loco.md").read_text()
    results = root / "benchmarks" / "results" / "local_schedule.json"
    models = json.loads(results.read_text())["models"]
    pattern = (
        r"^\| (text|code|digits) \| (\w+) \| (\d) \| (\d+) \| ([\d,]+) "
        r"\| (.*) \|$"
    )
    rows = re.findall(pattern, page, re.M)
    assert len(rows) >= 20
    for data, inner, workers, every, steps, shown in rows:
        steps = int(steps.replace(",", ""))
        name, adamw = (
            next(
                name
                for name, model in local_schedule.MODELS.items()
                if name.startswith(f"{data}, {workers} ")
                and (model.steps, model.inner) == (steps, each)
            )
            for each in (inner, "AdamW")
        )
        fewer, *cells = shown.split(" | ")
        times = 5000 if fewer.startswith("5") else 1000
        best = local_schedule.BEST(int(every), fewer=times).name
        found = models[name]["runs"][str(steps)][best]
        assert len(found["runs"]) == 5
        assert fewer == f"{found['fewer']:,.0f}"
        _, accuracy, _, bits = seeds.against_dense(
            found["runs"], models[adamw]["runs"][str(steps)]["dense"]["runs"]
        )
        assert cells == [accuracy, bits]
