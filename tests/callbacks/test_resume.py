"""Real workers are killed, and others resume their training."""

import pathlib
import shutil

import keras
import numpy as np
import pytest
import real_workers
import tensorflow as tf
from arrays import assert_close, assert_equal
from scripts import resume

import tf_optimizers as tfo

pytestmark = [
    pytest.mark.long,
    # One process resumes the training of two, and the reverse.
    pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic"),
]
STEPS_OF_EPOCH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def results(folder):
    """Return the reports of trainings, by name and worker.

    Names of elastic trainings say which workers wrote the backup, and which
    restored it. Processes cost more than steps, so each runs several trainings.
    """

    def run(count, *tasks, **kwargs):
        outcome = real_workers.run("resume", folder, count, *tasks, **kwargs)
        assert outcome.exit_code == 0, outcome.output[-5000:]
        deaths = outcome.output.count("was killed by signal 9")
        assert deaths == kwargs.get("restarts", 0)
        return {
            name: [result[name] for result in outcome.results]
            for name in outcome.results[0]
        }

    def alone(name, epochs):
        strategy = tf.distribute.get_strategy()
        return [resume.elastic(strategy, folder / name, epochs)[1]]

    found = {"1": alone("1", 1), "4": run(4, "4:1")["4:1"]}
    shutil.copytree(folder / "1", folder / "1-2")
    shutil.copytree(folder / "4", folder / "4-2")
    names = "equal", "2:1", "2:2", "1-2:2", "flight:flight"
    two = run(2, *names, restarts=1)
    found |= {"killed": two["killed"], "alone": two["alone"]}
    found |= {"2 once": two["2:1"], "2": two["2:2"]}
    found["1-2"] = two["1-2:2"]
    # Four replicas, like four workers, but pairs share a residual.
    found["4-2"] = run(2, "4-2:2", devices=2)["4-2:2"]
    shutil.copytree(folder / "2", folder / "2-1")
    found["2-1"] = alone("2-1", 3)
    shutil.copytree(folder / "flight", folder / "flight-1")
    three = run(3, "2:3", "flight:flight")
    found["2-3"] = three["2:3"]
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    found["flight"] = {
        2: two["flight:flight"],
        3: three["flight:flight"],
        1: [resume.in_flight(strategy, folder / "flight-1")],
    }
    return found


@pytest.mark.parametrize("name", resume.NAMES)
def test_killed_training_equals_an_uninterrupted_one(results, name):
    step = resume.STEPS[name]
    for killed, alone in zip(results["killed"], results["alone"], strict=True):
        killed, alone = dict(killed[name]), dict(alone[name])
        saved = step // resume.SAVE_EVERY * resume.SAVE_EVERY
        assert (killed.pop("start"), alone.pop("start")) == (saved, 0)
        assert killed == alone


def sums(results, when):
    """Return the sums over workers, by variable."""
    return [
        np.sum(parts, axis=0)
        for parts in zip(
            *(map(np.array, result[when]["sums"]) for result in results),
            strict=True,
        )
    ]


@pytest.mark.parametrize("name", ["1-2", "4-2", "2-1", "2-3"])
def test_residuals_are_distributed_among_other_workers(results, name):
    """DGC's residuals and momentums are complete, and used."""
    source, target = results[name[0]], results[name]
    assert len(target) == int(name[-1])
    before, after = sums(source, "end"), sums(target, "start")
    for a, b in zip(before, after, strict=True):
        assert np.abs(a).max() > 1e-3
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-8)
    last = source[0]["end"]["step"]
    for result in target:
        assert result["start"]["step"] == last
        assert result["end"]["step"] == last + STEPS_OF_EPOCH
        assert result["weights"] == target[0]["weights"]
        assert result["start"]["own"] == target[0]["start"]["own"]
        assert result["start"]["equal"]
        assert result["end"]["equal"]


@pytest.mark.parametrize("workers", [1, 3])
def test_entries_that_travelled_are_not_lost(results, workers):
    """A backup waits for them; then, other workers have all movements."""
    source, target = results["flight"][2], results["flight"][workers]
    assert len(target) == workers
    for result in target:
        assert result["start"]["taken"] == source[0]["backup"]["taken"] == 7
        assert result["start"]["common"] == source[0]["backup"]["common"]
        assert result["weights"] == target[0]["weights"]
    before = zip(*(each["backup"]["moved"] for each in source), strict=True)
    after = zip(*(each["start"]["moved"] for each in target), strict=True)
    for a, b in zip(before, after, strict=True):
        total = np.sum(a, 0)
        assert np.abs(total).max() > 1e-3
        np.testing.assert_allclose(np.sum(b, 0), total, rtol=1e-5, atol=1e-7)
    assert source[1]["backup"]["common"] == source[0]["backup"]["common"]


def test_same_number_of_workers_keeps_residuals(results):
    ends = [result["end"]["own"] for result in results["2 once"]]
    starts = [result["start"]["own"] for result in results["2"]]
    assert starts == ends
    assert ends[0] != ends[1]


@pytest.mark.parametrize("kind", ["keras", "weights.h5", "checkpoint"])
@pytest.mark.parametrize("place", [0, 1])
def test_files_of_keras_on_each_worker_hold_the_sum(
    results, folder, kind, place
):
    saves = pathlib.Path(folder / f"saves-{place}")
    if kind == "keras":
        model = keras.saving.load_model(saves / "model.keras")
    else:
        model = resume.make_model(tf.distribute.get_strategy())
        if kind == "weights.h5":
            model.load_weights(saves / "model.weights.h5")
        else:
            checkpoint = tf.train.Checkpoint(model=model)
            checkpoint.read(str(saves / "checkpoint")).assert_consumed()
    assert_close(
        resume.memory(model)["sums"],
        sums(results["2"], "end"),
        rtol=1e-6,
        atol=1e-8,
    )
    expected = results["2"][place]["weights"]
    assert_equal(model.get_weights(), expected)
