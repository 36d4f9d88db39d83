"""Real workers that are killed, and others that go on in their place."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
import workers
from programs import resume

pytestmark = pytest.mark.slow


def test_killed_training_equals_an_uninterrupted_one(tmp_path):
    """Chief and worker in turn, by SIGKILL, at a step of its own each."""
    steps = np.random.default_rng(0).integers(5, 35, len(resume.NAMES))
    results = {}
    for name, kills in (("alone", [-1] * len(steps)), ("killed", steps)):
        folder = tmp_path / name
        folder.mkdir()
        outcome = workers.run(
            *("resume", folder, 2, "equal", *kills),
            restarts=len(steps) if name == "killed" else 0,
            timeout=600,
        )
        assert outcome.exit_code == 0, outcome.output[-5000:]
        assert outcome.output.count("was killed by signal 9") == (
            len(steps) if name == "killed" else 0
        )
        results[name] = outcome.results
    for alone, killed in zip(*results.values(), strict=True):
        for name, step in zip(resume.NAMES, steps, strict=True):
            start = killed[name].pop("start")
            # The last optimizer's training is the last to have been resumed.
            is_last = name == resume.NAMES[-1]
            saved = step // resume.SAVE_EVERY * resume.SAVE_EVERY
            assert start == (saved if is_last else 36), name
            assert alone[name].pop("start") == 0
            assert killed[name] == alone[name], name


def sums(results, folder, when):
    """What all workers hold together, by variable."""
    return [
        np.sum(parts, axis=0)
        for parts in zip(
            *(map(np.array, r[folder][when]["sums"]) for r in results),
            strict=True,
        )
    ]


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    """The folder, those who wrote backups, and those who took them up.

    Two workers are of two devices each: as many replicas as four workers.
    """
    folder = tmp_path_factory.mktemp("elastic")

    def run(count, *trainings, devices=1):
        return workers.results(
            *("resume", folder, count, "elastic", *trainings), devices=devices
        )

    sources = {"4": run(4, "4:1"), "1": run(1, "1:1")}
    for name in ("4-2", "1-2"):
        shutil.copytree(folder / name[0], folder / name)
    sources["2"] = two = run(2, "2:1", "4-2:2", "1-2:2", devices=2)
    for name in ("2-3", "2-1", "2-2"):
        shutil.copytree(folder / "2", folder / name)
    targets = {
        **{"4-2": two, "1-2": two, "2-2": run(2, "2-2:2", devices=2)},
        **{"2-3": run(3, "2-3:2"), "2-1": run(1, "2-1:2")},
    }
    return folder, sources, targets


def test_memory_is_shared_out_among_other_workers(elastic):
    """DGC's unsent gradient and momentum are all there, and used."""
    _, sources, targets = elastic
    for name, results in targets.items():
        before = sums(sources[name[0]], name[0], "end")
        after = sums(results, name, "start")
        for a, b in zip(before, after, strict=True):
            assert np.abs(a).max() > 1e-3
            np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-8)
        for result in results:
            assert result[name]["start"]["step"] == 12
            assert result[name]["end"]["step"] == 24
            assert result[name]["start"]["alike"]
            assert result[name]["end"]["alike"]
            assert result[name]["weights"] == results[0][name]["weights"]


def test_each_of_as_many_workers_goes_on_with_its_own_memory(elastic):
    _, sources, targets = elastic
    ends = [result["2"]["end"]["own"] for result in sources["2"]]
    starts = [result["2-2"]["start"]["own"] for result in targets["2-2"]]
    assert starts == ends
    assert ends[0] != ends[1]
    halves = {result["4-2"]["start"]["own"] for result in targets["4-2"]}
    assert len(halves) == 1


@pytest.mark.filterwarnings("ignore:DGCMomentum saves traffic")
@pytest.mark.parametrize("kind", ["keras", "weights.h5", "checkpoint"])
@pytest.mark.parametrize("place", [0, 1])
def test_what_keras_saves_on_each_worker_holds_the_sum(elastic, kind, place):
    folder, sources, _ = elastic
    path = folder / f"saves-{place}" / "2"
    if kind == "keras":
        model = keras.saving.load_model(f"{path}.keras")
    else:
        model = resume.make_model(tf.distribute.get_strategy(), "dgc")
        model.optimizer.build(model.trainable_variables)
        if kind == "weights.h5":
            model.load_weights(f"{path}.weights.h5")
        else:
            tf.train.Checkpoint(model=model).read(str(path)).assert_consumed()
    for found, expected in zip(
        resume.memory(model)["sums"],
        sums(sources["2"], "2", "end"),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)
    for found, expected in zip(
        model.get_weights(), sources["2"][place]["2"]["weights"], strict=True
    ):
        np.testing.assert_array_equal(found, expected)
