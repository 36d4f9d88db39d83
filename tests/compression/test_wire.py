"""Entries are sent as a dense tensor where that takes fewer bytes."""

import math

import dgc
import numpy as np
import pytest
import tensorflow as tf
from arrays import assert_equal

from tf_optimizers.compression.exchanges import (
    GatheredExchange,
    choose_exchange,
)
from tf_optimizers.compression.sharded_exchange import ShardedExchange
from tf_optimizers.compression.sparsity_schedule import sent_count
from tf_optimizers.compression.wire import Wire

SIZE = 10**6


@pytest.mark.parametrize(
    ("replicas", "packed", "dtype", "densest"),
    [
        # TensorFlow's strategy takes 8 bytes per entry; ours, a bit per
        # element, and values.
        (2, False, "float32", 0.5),
        (2, True, "float32", 31 / 32),
        (4, True, "float16", 15 / 16),
        (8, True, "float32", 7 / 32),
        (32, False, "float32", 1 / 32),
        (8, True, "int4", 7 / 4.25),
        # For fewer entries, three bits per entry, and one bit per four
        # elements.
        (32, True, "int4", 1.75 / 7.25),
        (32, True, "int2", 1 / 2.5),
    ],
)
def test_rule_compares_the_bytes_that_replicas_pass_on(
    replicas, packed, dtype, densest
):
    """In a ring: (N - 1) k pairs, or 2 (N - 1) / N of 4 bytes per element."""
    wire = Wire(replicas, dtype, packed)
    for share in (0.98 * densest, 1.02 * densest):
        count = int(share * SIZE)
        pair = wire.entry_bits(SIZE, count) / 8
        passed_on = (replicas - 1) * pair, 2 * (replicas - 1) / replicas * 4e6
        is_dense = passed_on[0] > passed_on[1]
        gathered = GatheredExchange(wire, [SIZE], [count])
        assert gathered.is_dense(0) is is_dense is (share > densest)
        words = SIZE if is_dense else math.ceil(pair / 4)
        assert gathered.sent_bytes() == [4 * words]
        cost = 4e6 / replicas if is_dense else pair
        assert gathered.peer_bytes == pytest.approx(cost)


def test_warm_up_of_many_workers_becomes_sparse():
    wire = Wire(32, "float32", is_packed=True)
    stages = (0.75, 0.9375, 0.984375, 0.996, 0.999)
    size = 4 * SIZE
    counts = [sent_count(size, stage) for stage in stages]
    is_dense = [
        GatheredExchange(wire, [size], [count]).is_dense(0) for count in counts
    ]
    assert is_dense == [True, True, False, False, False]
    is_sharded = [
        isinstance(choose_exchange(wire, [size], [count]), ShardedExchange)
        for count in counts
    ]
    assert is_sharded == [False, True, True, False, False]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int2"])
def test_both_ways_give_the_same_weights(mirrored, monkeypatch, dtype):
    shapes = [(40, 50), (300,)]

    def train():
        run = dgc.Run(
            mirrored,
            {str(i): np.zeros(shape) for i, shape in enumerate(shapes)},
            sparsity=(0.25,),
            value_dtype=dtype,
        )
        for step in range(5):
            run.step(dgc.make_gradients(step, shapes, 2))
        return run

    dense = train()
    traffic = dense.optimizer.communication_summary()["total"]
    monkeypatch.setattr(GatheredExchange, "is_dense", lambda *_: False)
    sparse = train()
    assert traffic["ratio"] == 1.0
    assert sparse.optimizer.communication_summary()["total"] != traffic
    assert dgc.worst(dense.weights(), sparse.weights()) < 1e-6
    for side in ("momentum", "residual"):
        assert_equal(dense.memory(side), sparse.memory(side))


@pytest.mark.parametrize(("is_packed", "index"), [(True, 4), (False, 8)])
def test_row_of_a_sparse_gradient_is_its_values_and_an_index(is_packed, index):
    """Our strategy sends indices as int32 if they fit."""
    wire = Wire(2, "float32", is_packed)
    rows = tf.IndexedSlices(
        tf.zeros([3, 2, 5]), tf.zeros([3], tf.int64), tf.constant([7, 2, 5])
    )
    assert wire.row_bytes(rows) == 4 * 10 + index
