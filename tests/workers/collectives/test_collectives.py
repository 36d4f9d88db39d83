"""Instance keys and results of collectives."""

import collections
import itertools
import re
import time

import numpy as np
import pytest
import real_workers
import tensorflow as tf
from local import per_replica

import tf_optimizers as tfo
from tf_optimizers.workers.collectives.all_reduce import (
    SparseCollectiveAllReduce,
)
from tf_optimizers.workers.collectives.launcher import (
    Group,
    KeyedLauncher,
    levels,
    ranks_in,
)
from tf_optimizers.workers.collectives.progress import (
    _OPERATIONS,
    DTYPES,
    describe,
    instance_key,
    kind_number,
)
from tf_optimizers.workers.extended import SparseExtended


@pytest.fixture
def strategies(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return [tfo.SparseMultiWorkerMirroredStrategy() for _ in range(2)]


def test_strategies_do_not_share_collectives(strategies):
    """Two shapes in one collective would be an error."""

    def summed(strategy, tensor):
        def replica():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", tensor)

        step = tf.function(lambda: strategy.run(replica))
        return strategy.experimental_local_results(step())[0]

    for size in (1, 2):
        for strategy, extra in zip(strategies, (0, 5), strict=True):
            tensor = tf.range(size + extra)
            total = summed(strategy, tensor)
            np.testing.assert_array_equal(total, 2 * tensor)


def test_gathered_statements_wait_for_all_replicas_of_the_worker(
    strategies, monkeypatch
):
    """Otherwise a failing check would cancel a gather in progress."""
    extended, ended = strategies[0].extended, []

    def noting(name, tensor, seconds=0.0):
        def note(value):
            time.sleep(seconds)
            ended.append(name)
            return value

        return tf.numpy_function(note, [tensor], tensor.dtype)

    monkeypatch.setattr(
        extended.channel,
        "all_gather",
        lambda part, rank: noting(rank, part, 0.2 * rank),
    )
    # Unlike a `tf.function`, this graph runs only operations that its result
    # needs, in any order.
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        session.run(noting("check", extended.gather_notes(tf.constant([1]))))
    assert ended == [0, 1, "check"]


@pytest.fixture
def eager_functions():
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def test_gathers_work_while_functions_run_eagerly(strategies, eager_functions):
    strategy, _ = strategies
    ranks = per_replica(strategy, lambda rank: tf.constant([rank]))
    np.testing.assert_array_equal(strategy.gather(ranks, 0), [0, 1])

    def gathered(rank):
        return tf.distribute.get_replica_context().all_gather(rank, 0)

    for each in strategy.run(gathered, (ranks,)).values:
        np.testing.assert_array_equal(each, [0, 1])
    assert tf.config.functions_run_eagerly()


@pytest.mark.parametrize(
    "ours",
    [
        tfo.SparseMultiWorkerMirroredStrategy,
        SparseExtended,
        SparseCollectiveAllReduce,
    ],
)
def test_private_names_are_not_tensorflow_s(ours):
    """Names that _compat/ replaces intentionally do not count."""
    own = {
        name
        for one in ours.mro()
        if one.__module__.startswith("tf_optimizers.workers.strategy")
        for name in vars(one)
        if name.startswith("_") and not name.startswith("__")
    }
    theirs = {
        name
        for one in ours.mro()
        if not one.__module__.startswith("tf_optimizers")
        for name in vars(one)
    }
    assert not own & theirs


def test_numbers_of_different_collectives_differ():
    sizes = [1, 2, 5, 1000, 2**25, 2**26 - 1, *(i << 26 for i in range(1, 30))]
    numbers = [
        instance_key(kind_number(kind, dtype), size)
        for kind, dtype, size in itertools.product(_OPERATIONS, DTYPES, sizes)
    ]
    numbers += [
        instance_key(kind_number("CollectiveGatherV2", tf.int32), size, layout)
        for size, layout in itertools.product(
            sizes[:6], [1, 2**32, 3_141_592_653]
        )
    ]
    assert len(set(numbers)) == len(numbers)
    # TensorFlow counts from 100.
    assert min(numbers) >= 2**26 and max(numbers) < 2**31


@pytest.mark.parametrize("size", [1, 2**26 + 3, 2**33 + 5])
def test_number_is_the_same_whether_the_size_is_known_or_not(size):
    """One worker may have traced for one shape; another, for any."""
    for kind, dtype in itertools.product(_OPERATIONS, DTYPES):
        number = instance_key(
            kind_number(kind, dtype), tf.constant(size, tf.int64)
        )
        assert number.dtype == tf.int32
        assert number == instance_key(kind_number(kind, dtype), size)
    number = instance_key(1, tf.constant(size, tf.int64), 2**32)
    assert number == instance_key(1, size, 2**32)


def test_numbers_do_not_depend_on_earlier_traces(strategies):
    strategy = strategies[0]

    def numbers(size):
        def replica():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", tf.zeros([size]))

        step = tf.function(lambda: strategy.run(replica), autograph=False)
        graph = step.get_concrete_function().graph
        return {
            int(tf.get_static_value(operation.inputs[3]))
            for operation in graph.get_operations()
            if operation.type.startswith("Collective")
        }

    for size in (5, 100_000):  # One tensor is gathered, the other is not.
        first = numbers(size)
        assert len(first) == 1 and numbers(size + 1) != first
        assert numbers(size) == first


@pytest.mark.long
def test_workers_that_trace_differently_find_each_other(tmp_path):
    """This includes equal collectives in a step, in `tf.cond` and in loops."""
    results = real_workers.results("instances", tmp_path, 3, timeout=300)
    assert [result["traces"] for result in results] == [1, 3, 1]
    for result in results:
        assert result["wrong sums"] == 0
        assert result["wrong gathers"] == []
        assert result["wrong large sums"] == []
        # No worker waits forever.
        seconds, error = result["unequal sum"]
        assert seconds < 30 and "Collective ops is aborted" in error
    errors = [result["unequal sum"][1] for result in results]
    said = [
        rf"CollectiveGatherV2 of {5 + rank % 2} int32 in the layout \w+ "
        f"on worker {rank}"
        for rank in range(3)
    ]
    assert any(
        "All workers must exchange values of the same sizes and dtypes" in error
        for error in errors
    ), errors
    assert any(
        re.search(f"{said[rank]}, {said[(rank + 1) % 3]}", errors[rank])
        for rank in range(3)
    ), errors


@pytest.mark.parametrize("count", [64, 72, 74, 100, 1024])
def test_two_levels_reach_all_workers_in_order(count):
    everybody = Group(7, count)
    groups = [levels(everybody, rank) for rank in range(count)]
    passed_on = [[rank] for rank in range(count)]
    for level in range(2):
        members = collections.defaultdict(list)
        for rank, own in enumerate(groups):
            members[own[level]].append(rank)
        assert all(len(m) == group.size for group, m in members.items())
        passed_on = [
            sum((passed_on[r] for r in members[own[level]]), [])
            for own in groups
        ]
    assert all(ranks == list(range(count)) for ranks in passed_on)
    messages = sum(group.size - 1 for group in groups[0])
    assert messages <= (count - 1) / 1.9


def test_ranks_follow_the_names_of_workers():
    tasks = [f"/job:worker/task:{i}" for i in range(12)]
    by_rank = [0, 1, 10, 11, *range(2, 10)]
    assert [by_rank[rank] for rank in ranks_in(tasks, 1)] == list(range(12))
    assert ranks_in(tasks[:3], 2) == list(range(6))
    assert ranks_in(tasks, 2)[20:24] == [4, 5, 6, 7]


def test_rows_are_ordered_by_replica_not_by_name():
    count, everyone = 12, range(12)
    ranks = ranks_in([f"/job:worker/task:{i}" for i in everyone], 1)
    assert ranks != sorted(ranks)
    replica_at = {rank: replica for replica, rank in enumerate(ranks)}

    def launcher(run):
        own = object.__new__(KeyedLauncher)
        own._group_size, own._ranks, own._sends_at_once = count, ranks, False
        own._has_all_to_all = True
        own._run = run
        return own

    def send(kind, rows, *_, **__):
        sent.append(rows.numpy())
        return rows

    sent = []
    for replica in everyone:
        rows = tf.constant([[100 * replica + to, 0] for to in everyone])
        launcher(send).all_to_all(rows)
    for replica in everyone:
        # By ranks, as TensorFlow does.
        received = [sent[replica_at[r]][ranks[replica]] for r in everyone]
        every = launcher(lambda *_, came=received, **__: tf.constant(came))
        rows = every.all_to_all(tf.zeros([count, 2], tf.int32))
        wanted = [[100 * other + replica, 0] for other in everyone]
        assert rows.numpy().tolist() == wanted
    by_rank = tf.constant([[100 * replica_at[r], 1] for r in everyone])
    every = launcher(lambda *_: tf.reshape(by_rank, [-1]))
    rows = every.gather(tf.zeros([1, 2], tf.int32), None)
    assert rows.numpy().tolist() == [[100 * r, 1] for r in everyone]


@pytest.mark.parametrize("count", [2, 16, 63, 67])
def test_few_replicas_and_primes_gather_in_one_level(count):
    everybody = Group(7, count)
    assert levels(everybody, count - 1) == [everybody]


@pytest.mark.long
@pytest.mark.parametrize(("workers", "steps"), [(4, 20), (12, 4)])
def test_two_levels_exchange_the_same(tmp_path, workers, steps):
    """With 12 workers, TensorFlow's order is not that of their numbers."""
    everybody = [[rank] * 3 for rank in range(workers) for _ in range(2)]
    results = real_workers.results(
        "levels", tmp_path, workers, steps, timeout=300
    )
    for one, two in results:
        assert one["is_sum"]
        assert two["is_sum"]
        assert one["gathered"] == two["gathered"] == [everybody]
        kinds = set(one["collectives"]) | set(two["collectives"])
        assert kinds == {"CollectiveGatherV2"}
        count = one["collectives"]["CollectiveGatherV2"]
        assert two["collectives"]["CollectiveGatherV2"] == 2 * count
        assert one["weights"] == two["weights"] == results[0][0]["weights"]


def test_collectives_are_described():
    kind = kind_number("CollectiveGatherV2", tf.int64)
    assert describe(kind, 7) == "CollectiveGatherV2 of 7 int64"
    assert describe(21, 1) == "CollectiveAllToAllV2 of 1 another dtype"
    assert describe(0, 0) == "no collective"


MANY = """
import tensorflow as tf

cpu, *_ = tf.config.list_physical_devices("CPU")
each = tf.config.LogicalDeviceConfiguration()
tf.config.set_logical_device_configuration(cpu, [each] * 12)

import tf_optimizers as tfo
from tf_optimizers.replicas import replicas_of

strategy = tfo.SparseMultiWorkerMirroredStrategy()


def exchange():
    rows = 100 * replicas_of().rank + tf.range(12)
    return replicas_of().all_to_all(rows[:, tf.newaxis])


step = tf.function(lambda: strategy.run(exchange), autograph=False)
received = strategy.experimental_local_results(step())
for rank, rows in enumerate(received):
    assert rows[:, 0].numpy().tolist() == [100 * r + rank for r in range(12)]
"""


def test_many_replicas_of_a_process_exchange_rows():
    """TensorFlow (2.21) cannot tell messages 1 to 11 and 11 to 1 apart."""
    real_workers.output_of(MANY)
