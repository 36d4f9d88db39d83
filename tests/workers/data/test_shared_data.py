"""Shared data have the same length and order on all workers."""

import json
import re
import threading
import time
import types
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.data.ops import shuffle_op

from tf_optimizers.workers.agreement import statements as agreement
from tf_optimizers.workers.data import (
    batch_digests,
    batch_splits,
    data_distribution,
    shuffles,
)
from tf_optimizers.workers.data import order as shared_data

ROWS = np.arange(32, dtype="float32")[:, None]


@pytest.fixture
def seed(monkeypatch):
    """Set the seed of unseeded shuffles, for this test only."""
    for owner, name in (
        (shuffle_op, "_shuffle"),
        (ArrayDataAdapter, "get_tf_dataset"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    seed = shared_data._ShuffleSeed()
    monkeypatch.setattr(shared_data, "_shuffle_seed", seed)
    shared_data._shuffle_in_one_order.cache_clear()
    tf.random.set_seed(None)
    yield seed
    shared_data._shuffle_in_one_order.cache_clear()


def rows_of(data):
    return [int(row) for batch in data for row in np.ravel(batch)]


def epochs_of_fit(shuffle=True):
    """Return the rows of two epochs."""
    seen = []

    class Model(keras.Model):
        def train_step(self, data):
            seen.extend(np.ravel(data[0]).tolist())
            return {"loss": 0.0}

    model = Model()
    model.compile("sgd", run_eagerly=True)
    how = {"batch_size": 5, "epochs": 2, "shuffle": shuffle}
    model.fit(ROWS, ROWS, **how, verbose=0)
    return seen[:32], seen[32:]


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_arrays_are_in_the_order_of_the_seed(seed, shuffle):
    seed.set(7)
    first, second = epochs_of_fit(shuffle)
    assert sorted(first) == sorted(second) == [*range(32)]
    assert first != second
    fits = []
    for number in (7, 7, 8):
        seed.set(number)
        fits.append(epochs_of_fit(shuffle))
    assert fits[0] == fits[1] != fits[2]


def test_tf_data_are_in_the_order_of_the_seed(seed):
    def epochs(number):
        seed.set(number)
        data = tf.data.Dataset.range(32).shuffle(32)
        return rows_of(data), rows_of(data)

    first, second = epochs(7)
    assert first != second
    assert epochs(7) == (first, second)
    assert epochs(8)[0] != first
    data = tf.data.Dataset.range(32).shuffle(32, seed=1)
    (seeds,) = shuffles.seeds_of_shuffles(data)
    assert seeds[1] == 1


def test_each_shuffle_has_its_own_seed(seed):
    """MixUp pairs the rows of two shuffles of the same data."""
    seed.set(7)
    data = tf.data.Dataset.range(200)
    pairs = tf.data.Dataset.zip((data.shuffle(200), data.shuffle(200)))
    assert sum(int(a == b) for a, b in pairs) < 10


def test_other_shuffles_do_not_change_a_seed(seed):
    """Only one worker may have looked at other data before."""

    def rows():
        return rows_of(tf.data.Dataset.range(32).shuffle(32))

    seed.set(7)
    expected = rows()
    seed.set(7)
    tf.data.Dataset.range(8).shuffle(8)
    assert rows() == expected


@pytest.mark.parametrize("policy", ["AUTO", "DATA", "FILE", "OFF"])
def test_shared_data_have_one_order(policy):
    """The order does not depend on the file system."""
    options = tf.data.Options()
    options.deterministic = False
    kinds = tf.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = kinds[policy]
    data = tf.data.Dataset.range(8).batch(2).with_options(options)
    assert shared_data.is_shared(data) is (policy in ("AUTO", "DATA"))
    chosen = shared_data.in_one_order(data).options()
    assert chosen.deterministic
    assert chosen.experimental_distribute.auto_shard_policy == kinds[policy]


def test_seed_of_the_user_is_respected(seed):
    def rows():
        tf.random.set_seed(1)
        return rows_of(tf.data.Dataset.range(32).shuffle(32)), epochs_of_fit()

    expected = rows()
    seed.set(7)
    assert rows() == expected


def test_random_numbers_of_other_functions_stay_new(seed):
    """With a global seed, they would be the same in every epoch."""
    seed.set(7)
    data = tf.data.Dataset.range(3).map(lambda _: tf.random.uniform([]))
    first, second = (np.array([*data.as_numpy_iterator()]) for _ in range(2))
    assert (first != second).all()


def test_seeds_of_all_parts_of_a_data_set_are_found():
    data = tf.data.Dataset.range(8).shuffle(8, seed=1)
    data = tf.data.Dataset.zip((data, data.shuffle(8, seed=2).batch(1)))
    data = data.map(lambda a, b: (a, tf.random.shuffle(b, seed=3))).prefetch(1)
    seeds = [seed for _, seed in shuffles.seeds_of_shuffles(data)]
    assert seeds == [3, 1, 2, 1]


def _is_checked(row):
    tf.debugging.assert_less(row, tf.constant(9, tf.int64))
    return row


def _draw(*_):
    return tf.random.uniform([])


@pytest.mark.parametrize(
    "transform, is_random",
    [
        (lambda data: data.map(_draw), True),
        (lambda data: data.map(tf.function(_draw)), True),
        (lambda data: data.scan(0.0, lambda sum, _: (sum, _draw())), True),
        (lambda data: data.interleave(lambda _: data.map(_draw)), True),
        (
            lambda data: data.flat_map(
                lambda _: data.scan(0.0, lambda sum, _: (sum, _draw()))
            ),
            True,
        ),
        (lambda data: data.map(_is_checked), False),
        (lambda data: data.map(tf.function(_is_checked)), False),
        (
            lambda data: data.map(keras.layers.IntegerLookup(vocabulary=[1])),
            False,
        ),
        (lambda data: data.scan(0, lambda sum, row: (sum, row)), False),
    ],
)
def test_maps_of_data_are_random_or_not(transform, is_random):
    data = transform(tf.data.Dataset.range(4))
    assert shuffles.has_random_maps(data) is is_random


NO_STATE = types.SimpleNamespace(
    take_set=lambda: False, adopt_set=lambda has_set: None
)


def agree(dataset, batches, *others, rows=None):
    """Agree as worker 0; other workers have different statements."""
    strategy = types.SimpleNamespace(
        common_state=NO_STATE, extended=types.SimpleNamespace(workers=2)
    )

    def gather(strategy, subject, statement, hint):
        change = [
            [
                value if other is None else other
                for value, other in zip(statement, [*worker, None], strict=True)
            ]
            for worker in others
        ]
        return json.loads(json.dumps([statement, *change]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_data, "gather_statements", gather)
        return shared_data.agree_on_data(strategy, dataset, batches, rows)


@pytest.fixture
def alone(monkeypatch, seed):
    """Patch the barrier before errors, since there is no cluster."""
    store = types.SimpleNamespace(meet=lambda key, seconds: None)
    monkeypatch.setattr(agreement, "coordination", store)


def test_report_of_a_failure_does_not_wait_long(monkeypatch):
    """If other workers wait for nothing, the report never ends."""
    monkeypatch.setattr(data_distribution, "_REPORTING_SECONDS", 0.1)
    reported, ended = threading.Event(), threading.Event()

    def gather(note):
        reported.set()
        assert ended.wait(60)

    extended = mock.Mock(workers=2, gather_notes=gather)
    strategy = types.SimpleNamespace(extended=extended, compares_data=True)
    start = time.monotonic()
    try:
        data_distribution.report_failure(strategy)
        assert time.monotonic() - start < 30
        assert reported.wait(30)
    finally:
        ended.set()


def test_lengths_must_be_the_same(alone):
    data = tf.data.Dataset.range(8)
    agree(data, 3, [None] * 4)
    message = "3 on worker 0, an unknown number on worker 1, 5 on worker 2. Use"
    with pytest.raises(RuntimeError, match=message):
        agree(data, 3, [-2, None, None, None], [5, None, None, None])


def test_rows_of_all_workers_are_known_if_no_batch_has_others(alone):
    data = tf.data.Dataset.range(8)
    others = [[None, None, None, 2], [None, None, None, 5]]
    assert agree(data, 3, *others, rows=3) == 10
    assert agree(data, 3, *others) is None


def test_generators_of_the_host_follow_the_first_worker(alone):
    data = tf.data.Dataset.range(8).batch(2)
    np.random.seed(1)
    expected = np.random.get_state()[1].tolist()
    agree(data, 3, [None] * 4)
    assert np.random.get_state()[1].tolist() == expected
    agree(data, 3, [None, None, [5, 6, 7], None])
    changed = np.random.get_state()[1].tolist()
    assert changed != expected
    np.random.seed(1)
    tf.random.set_seed(1)  # The user's choice.
    agree(data, 3, [None, None, [5, 6, 7], None])
    assert np.random.get_state()[1].tolist() == expected


def test_generators_of_workers_with_separate_data_do_not_change(alone):
    """With the same random numbers, all workers would have the same rows."""
    np.random.seed(1)
    expected = np.random.get_state()[1].tolist()
    agree(None, 3, [None, None, [5, 6, 7], None])
    assert np.random.get_state()[1].tolist() == expected


def test_eager_error_equals_that_of_a_graph():
    def check():
        batch_digests.check(
            tf.constant([0, 0, batch_digests.Verdict.DIFFERENT, 0])
        )

    with pytest.raises(tf.errors.InvalidArgumentError) as eager:
        check()
    with pytest.raises(tf.errors.InvalidArgumentError) as in_graph:
        tf.function(check)()
    assert eager.value.message.startswith("All workers must draw the same")
    assert "`next(iter(data))` may have read ahead" in eager.value.message
    told = in_graph.value.message.replace("\\'", "'")
    assert eager.value.message in told


@pytest.mark.parametrize("number", [0, 7])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (700, 5, 90)])
def test_values_of_any_size_have_a_digest(shape, number):
    number = tf.constant(number, tf.int64)
    batch = tf.zeros(shape)
    says, own = tf.split(batch_digests.digests((batch, batch), number), 2)
    assert not np.any(says)
    assert np.all(own[:2] != 0)
    assert not np.any(own[2:])
    # A known shape makes no difference.
    unknown = tf.function(
        batch_digests.digests,
        input_signature=[
            (tf.TensorSpec(None),) * 2,
            tf.TensorSpec([], "int64"),
        ],
    )
    assert np.array_equal(unknown((batch, batch), number)[8:], own)


@pytest.mark.parametrize("column", [-1, -2])
def test_digests_cover_all_elements_over_time(column):
    batch = np.zeros((700, 130), "float32")
    changed = batch.copy()
    changed[-1, column] = 1
    differ = [
        np.any(
            batch_digests.digests(tf.constant(batch), number)
            != batch_digests.digests(tf.constant(changed), number)
        )
        for number in tf.range(9, dtype=tf.int64)
    ]
    assert any(differ)
    assert not all(differ)


@pytest.mark.parametrize(
    ("parts", "rows"),
    [([[0, 1, 2], [3, 4], [5, 6]], [3, 2, 2]), ([[0], [0], [0]], [1, 0, 0])],
)
def test_parts_of_a_batch_are_never_empty(parts, rows):
    """Some layers would fail without rows, or crash the process."""
    found = batch_splits.split(tf.range(sum(rows)), range(3), 3)
    assert [part.numpy().tolist() for part, _ in found] == parts
    assert [int(count) for _, count in found] == rows


@pytest.mark.parametrize("is_static", [True, False])
def test_values_with_more_rows_than_others_are_refused(is_static):
    """As in semi-supervised training, with more rows without labels."""
    few, many = (
        tf.data.Dataset.from_tensor_slices(ROWS).batch(n, is_static)
        for n in (2, 8)
    )

    def second_part(*batch):
        return batch_splits.split(batch, range(1, 2), 2)[0]

    message = (
        "All values of a batch must have the same number of rows.*2.* 8.* rows"
        ".*for each row of the other values, reshape"
    )
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as raised:
        next(iter(tf.data.Dataset.zip(few, many).map(second_part)))
    assert re.search(message, str(raised.value), re.DOTALL)
    # The remedy.
    many = many.map(lambda rows: tf.reshape(rows, [-1, 4, 1]))
    part, rows = next(iter(tf.data.Dataset.zip(few, many).map(second_part)))
    assert rows == 1
    assert [np.ravel(each).tolist() for each in part] == [[1], [4, 5, 6, 7]]


def test_all_digests_depend_on_the_form_of_a_batch():
    def of(*batch):
        given = [part for part in batch if part is not None]
        found = batch_digests.digests(given, tf.constant(0, tf.int64))
        return batch_digests.with_form(found, batch).numpy()

    x = tf.reshape(tf.range(4.0), [4, 1])
    first = of(x, x, None)
    assert np.array_equal(of(x, x, None), first)
    assert not np.any(first[10:])
    others = [
        of(x, x, x),
        of(x, None, x),
        of(tf.cast(x, tf.float64), x, None),
        of(x, tf.concat([x, x], 0), None),
        of(tf.concat([x, x], 0), x, None),
    ]
    for other in others:
        assert np.array_equal(other[:8], [1, 1, other[2], *[0] * 5])
        assert np.all(other[8:10] % 2 == 1)
        assert np.all(other[8:10] != first[8:10])
