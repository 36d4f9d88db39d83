"""Workers know the metadata of a batch when its step begins."""

import functools
import threading

import numpy as np
import pytest
import real_workers
import tensorflow as tf
from cases import error
from scripts import ahead, training

from tf_optimizers.workers.data.data_distribution import with_notes

# For float32 sums in another order, over steps of more than 1e-2.
TOLERANCE = 3e-5


def notes(data, replicas):
    """Return how many replicas have a part, and its rows: here, and later."""
    noted = with_notes(data, replicas)
    return [note.numpy()[:, :, :2].tolist() for _, note in noted]


def test_elements_have_the_rows_of_later_ones():
    data = tf.data.Dataset.range(10).batch(4)
    assert notes(data, 1) == [
        [[[1, 4], [1, 4]]],
        [[[1, 4], [1, 2]]],
        [[[1, 2], [0, 0]]],
    ]
    assert notes(data, 2) == [
        [[[1, 4], [1, 2]]],
        [[[1, 4], [0, 0]]],
        [[[1, 2], [0, 0]]],
    ]
    assert notes(data.take(0), 2) == []


ELEMENTS = {
    "nest": ({"a": tf.zeros([2, 0]), "b": (tf.zeros([2]), "text")}, 2),
    "of any kind": ((tf.zeros([3, 1]),) * 4, 3),
    "ragged": (tf.ragged.constant([[1], [], [2, 3]]), 3),
    "ragged twice": (tf.ragged.constant([[[1], []], [[2, 3]]]), 2),
    "sparse": (tf.sparse.from_dense([[1, 0], [0, 0]]), 2),
    "with None": ((tf.zeros([5]), None), 5),
    "optional": ((tf.zeros([2]), tf.experimental.Optional.empty(None)), 2),
    "without rows": (tf.constant(1.0), 1),  # All replicas have the same weight.
}


def values_of(element):
    leaves = tf.nest.flatten(element, expand_composites=True)
    return [
        np.asarray(leaf).tolist()
        for leaf in leaves
        if leaf is not None and leaf.dtype != tf.variant
    ]


@pytest.mark.parametrize(
    ("element", "rows"), ELEMENTS.values(), ids=ELEMENTS.keys()
)
def test_elements_stay_as_they_are(element, rows):
    data = tf.data.Dataset.from_tensors(element).repeat(2)
    noted = with_notes(data, 1)
    assert noted.element_spec[0] == data.element_spec
    for (actual, note), expected in zip(noted, data, strict=True):
        assert note[0, 0, :2].numpy().tolist() == [1, rows]
        assert values_of(actual) == values_of(expected)


def test_first_row_of_the_last_batch_stands_for_none():
    """Few layers accept a batch without rows."""
    data = tf.data.Dataset.range(5).batch(3)
    drawn = [
        (values.numpy().tolist(), note[0, 0, 1].numpy())
        for values, note in with_notes(data, 1, is_endless=True).take(4)
    ]
    assert drawn == [([0, 1, 2], 3), ([3, 4], 2), ([3], 0), ([3], 0)]
    (values, note), *_ = with_notes(data.skip(2), 1, is_endless=True).take(1)
    assert [*values.numpy(), note[0, 0, 1]] == [0, 0]


# Scenarios for two devices.
LONG = ["endless", "asks for the spec"]


@pytest.mark.filterwarnings("ignore:To make it possible to preserve")
@pytest.mark.parametrize("is_passed", [True, False], ids=["passed", "captured"])
def test_a_function_iterates_over_data_for_two_devices(ours, is_passed):
    data = ours.experimental_distribute_dataset(
        tf.data.Dataset.range(11).batch(4)
    )
    counts = []

    @tf.function
    def count(*given):
        batches = tf.constant(0)
        for _ in given[0] if is_passed else data:
            batches += 1
        return batches

    def call():
        counts.extend(int(count(*[data] * is_passed)) for _ in range(2))

    # A hang must not stop the other tests.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert counts == [3, 3]


def names_of(devices, scenarios):
    """Return the scenarios for workers with this number of devices."""
    return [name for name in scenarios if devices > 1 or name not in LONG]


@functools.cache
def alone(name):
    """Return the result of one process without a strategy."""
    return ahead.TRAININGS[name](tf.distribute.get_strategy())


TWO = pytest.param(2, marks=pytest.mark.long)


@pytest.fixture(scope="module", params=[1, TWO], ids="{} devices".format)
def workers(request, tmp_path_factory):
    """Return the reports of two workers, and the devices of each."""
    folder = tmp_path_factory.mktemp("ahead")
    names = names_of(request.param, ahead.TRAININGS | ahead.OTHERS)
    results = real_workers.results(
        "ahead", folder, 2, *names, devices=request.param
    )
    return results, request.param


@pytest.mark.slow
def test_no_collective_of_a_step_waits_for_another(workers):
    """Neither the loss nor its value waits for an earlier collective."""
    results, devices = workers
    for result in results:
        found = result["train function"]
        # For the gradients, the loss and, unless batches are drawn outside, the
        # next batch.
        assert len(found) >= (2 if ahead.DRAWS_EAGERLY else 3) * devices
        assert {*found.values()} == {1}, found


@pytest.mark.slow
def test_a_draw_does_not_wait_for_the_batch_after_it(workers):
    """Here, batches are drawn eagerly, before each step."""
    (first, second), _ = workers
    assert first["one after another"] is None
    assert second["one after another"] == "has drawn"


@pytest.mark.slow
def test_batches_are_drawn_in_any_way(workers):
    """Each batch comes with its number of rows."""
    results, devices = workers
    expected = {
        1: [2, 4, 2, 6, 8, 10, 4, 12],
        2: [6, 14, 6, 22, 30, 38, 14, 46],
    }[devices]
    assert [result["eagerly and not"] for result in results] == [expected] * 2


@pytest.mark.slow
def test_one_function_draws_from_data_of_two_kinds(workers):
    """Their notes differ in length."""
    results, devices = workers
    expected = {1: [4, 8, 4, 8], 2: [4, 16, 4, 4]}[devices]
    assert [result["two kinds"] for result in results] == [expected] * 2


@pytest.mark.slow
def test_nothing_is_exchanged_between_rounds(workers):
    """Rounds have four steps; an epoch has six batches.

    The agreement on a run also counts as a collective.
    """
    results, devices = workers
    if devices > 1:
        return
    for result in results:
        found = result["local rounds"]
        # Entries; logs, including those of the first step; digests of the first
        # two batches, of the rest of the round, and of the rest of the data.
        nothing = [1, 0, 0]
        epoch = [[1, 1, 1], nothing, nothing, [2, 1, 1], nothing, [1, 0, 1]]
        assert found["in rounds"]["counts"] == 2 * epoch
        # An endless iterator continues in the next epoch, with two batches that
        # are not known yet.
        expected = [*epoch[:5], nothing]
        expected += [[1, 1, 0], [1, 0, 1], *epoch[2:5], nothing]
        assert found["own"]["counts"] == expected
        old = found["in every step"]["counts"]
        assert [each[1:] for each in old[1:6]] == [[1, 1]] * 5
        # Values that travel in a round have their own channels.
        assert found["overlap"]["counts"] == 2 * [[1, 1, 1], *5 * [nothing]]


@pytest.mark.slow
def test_rounds_give_the_results_of_exchanging_steps(workers):
    results, _ = workers
    first, second = (result["local rounds"] for result in results)
    for name in first:
        assert second[name] == first[name]
        kind, *_ = name.split(", ")
        is_other = kind in ("own", "overlap")
        other = f"{kind}, in every step" if is_other else "in every step"
        if other not in first:  # Only with two devices.
            continue
        for what in ("weights", "history"):
            assert first[name][what] == first[other][what], name
    for name in ("own", "overlap"):
        assert first[name]["weights"] != first["in rounds"]["weights"]


@pytest.mark.slow
def test_entries_travel_in_a_custom_loop(workers):
    """With two devices a worker, the second step waited forever."""
    (first, second), _ = workers
    assert first["overlapping loop"] == second["overlapping loop"]


@pytest.mark.slow
def test_logs_between_rounds_are_the_last_that_workers_share(workers):
    results, devices = workers
    for result in results:
        found = result["local rounds"]
        every = found["in every step"]["losses"]
        assert len(set(every)) == len(every)
        shown = [every[i] for i in (0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9)]
        assert found["in rounds"]["losses"] == shown
        # Logs of a round, too, come in the next one.
        shown = found["overlap"]["losses"]
        assert shown == 6 * shown[:1] + 6 * shown[6:7]
        assert shown[0] == pytest.approx(every[0], 1e-6) != shown[6]
        if devices > 1:
            every = found["overlap, in every step"]["losses"]
            assert shown[6] == every[6]


@pytest.mark.slow
def test_tuning_threads_do_not_block(workers):
    """The thread sleeps, and does not notice that its iterator is deleted."""
    results, _ = workers
    assert max(result["dropped"] for result in results) < 1.5


@pytest.mark.slow
def test_workers_know_all_row_counts(workers):
    """This includes the time when some workers have no rows left."""
    (first, second), devices = workers
    expected = {
        1: [[[2, 4], [2, 4], [2, 2], [1, 1]], [[2, 4], [2, 4], [0, 2], [0, 1]]],
        2: [[[2, 2, 8], [2, 1, 3]], [[2, 2, 8], [0, 0, 3]]],
    }[devices]
    assert first["own lengths"] == [expected[0]] * 2
    assert second["own lengths"] == [expected[1]] * 2
    if devices > 1:
        assert first["asks for the spec"] == [6, 15]


@pytest.mark.slow
def test_uneven_batches_train_like_one_process(workers):
    (first, second), devices = workers
    start = training.make_model().get_weights()
    for name in names_of(devices, ahead.TRAININGS):
        expected = alone(name)
        assert second[name] == first[name], name
        assert error(start, expected["weights"]) > 1e-2
        actual = first[name]["weights"]
        assert error(actual, expected["weights"]) < TOLERANCE, name
