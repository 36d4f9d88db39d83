"""Gathers that ask for messages before the other workers send them."""

import gc
import os
import statistics
import time

import far_hosts
import hosts
import numpy as np
import pytest
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.workers.collectives import ahead
from tf_optimizers.workers.collectives.ahead import AheadGather, Kind
from tf_optimizers.workers.collectives.launcher import FEWEST_IN_LEVELS, Group
from tf_optimizers.workers.extended import _KEYS_PER_STRATEGY

ROUND_TRIP_MS = 400.0


@pytest.fixture
def strategy(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return tfo.SparseMultiWorkerMirroredStrategy()


def per_replica(strategy, make):
    """Return the result of `make` for every replica's rank."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )


def ahead_gather(strategy):
    """Return a step that gathers a replica's tensor on a later channel."""
    extended = strategy.extended
    channel = extended.later["entries"].channel

    def gather(tensor):
        return extended.in_replica(channel.all_gather, tensor)

    return lambda tensor: strategy.run(gather, (tensor,)).values


@pytest.mark.parametrize("dtype", ["int32", "int64", "float16", "float32"])
@pytest.mark.parametrize("is_eager", [False, True])
def test_many_messages_arrive_in_order(strategy, dtype, is_eager):
    gather = ahead_gather(strategy)
    if not is_eager:
        gather = tf.function(gather, autograph=False)
    for number in range(20):
        parts = [
            np.full([2, 3], 100 * rank + number, dtype) for rank in range(2)
        ]
        gathered = gather(per_replica(strategy, parts.__getitem__))
        for each in gathered:
            np.testing.assert_array_equal(each, np.concatenate(parts))


def test_empty_and_unknown_sizes_are_not_asked_for(strategy, monkeypatch):
    monkeypatch.delattr(AheadGather, "gather")
    gather = tf.function(ahead_gather(strategy), autograph=False)
    for row in (tf.zeros([0, 3]), tf.ones([2, 3])):
        spec = tf.TensorSpec([None, 3])
        unknown = tf.function(lambda row: gather(row), input_signature=[spec])
        for each in unknown(row):
            np.testing.assert_array_equal(each, np.concatenate([row, row]))
    np.testing.assert_array_equal(gather(tf.zeros([0]))[0], [])


def test_error_of_the_exchange_is_reported(strategy, monkeypatch):
    def fail(*args):
        raise tf.errors.UnavailableError(None, None, "the cable is cut")

    monkeypatch.setattr(AheadGather, "_receive", fail)
    gather, later = ahead_gather(strategy), strategy.extended.later["entries"]
    row = per_replica(strategy, lambda rank: tf.ones([1]))
    call = later.call(lambda _: gather(row))
    call.start(0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="cable is cut"):
        call.wait_for_all()


def test_pairs_of_two_strategies_have_different_keys():
    most = FEWEST_IN_LEVELS - 1
    assert ahead._LANES * most**2 <= _KEYS_PER_STRATEGY


def test_thread_ends_with_its_owner():
    class Owner:
        """Stands in for a launcher."""

    owner, everyone = Owner(), Group(1 << 12, 2)
    kind = Kind(1 << 26, 1, tf.int32)
    gather = AheadGather(owner, "CPU:0", everyone, 0, kind)
    assert gather.error is None
    del owner
    gc.collect()
    # A thread closes this queue at its end.
    with pytest.raises(tf.errors.OutOfRangeError, match="is closed"):
        gather._arrived.dequeue()
    assert isinstance(gather.error, tf.errors.OutOfRangeError)


def work():
    """Answer with the milliseconds of gathers, as a worker of the test."""
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    extended = strategy.extended
    channels = {
        "ring": extended.channel,
        "ahead": extended.later["entries"].channel,
    }

    def measure(name, pause):
        @tf.function(autograph=False)
        def gather(tensor):
            return channels[name].all_gather(tensor, 0, None)

        times = []
        for number in range(10):
            time.sleep(pause)  # Stands for a round of local steps.
            start = time.perf_counter()
            gather(tf.fill([100], number))
            times.append(1e3 * (time.perf_counter() - start))
        # In the first two gathers, workers agree on the groups of the lanes.
        return statistics.mean(times[2:])

    hosts.answer({"measure": measure})


@pytest.mark.long
@pytest.mark.parametrize("pause", [0.3, 0.0])
def test_gather_takes_half_of_a_round_trip(monkeypatch, pause):
    """A ring takes a whole round trip, however long the rounds are."""
    paths = [os.path.dirname(far_hosts.__file__), os.getenv("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    net = far_hosts.Loopback(2)
    with far_hosts.far_groups(net, [[__file__]]) as (group,):
        group.set_round_trip(ROUND_TRIP_MS)
        times = {
            name: min(group.ask(function="measure", name=name, pause=pause))
            for name in ("ring", "ahead")
        }
    assert times["ring"] > 0.9 * ROUND_TRIP_MS
    assert times["ahead"] < 0.75 * ROUND_TRIP_MS


if __name__ == "__main__":
    work()
