"""Collectives of several strategies, and of TensorFlow 1's graphs."""

import numpy as np
import pytest
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.distribute.sparse_all_reduce import (
    SparseCollectiveAllReduce,
    SparseExtended,
)


@pytest.fixture
def strategies(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return [tfo.SparseMultiWorkerMirroredStrategy() for _ in range(2)]


def test_strategies_do_not_meet_in_collectives(strategies):
    """Tensors of two shapes in one collective would be an error."""

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


def test_variable_of_a_legacy_graph_is_assigned_to(strategies):
    """Whether the strategy has run eagerly before or not."""
    strategy = strategies[0]
    for _ in range(2):
        with tf.Graph().as_default(), strategy.scope():
            variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)

            def replica(variable=variable):
                context = tf.distribute.get_replica_context()
                place = tf.cast(context.replica_id_in_sync_group, tf.float32)
                return variable.assign_add(place + 1)

            step = strategy.experimental_local_results(strategy.run(replica))
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                assert session.run(step) == (4.0, 4.0)
        ones = strategy.run(lambda: tf.constant(1.0))
        assert strategy.reduce("SUM", ones, axis=None) == 2.0


@pytest.mark.parametrize(
    "ours",
    [
        tfo.SparseMultiWorkerMirroredStrategy,
        SparseExtended,
        SparseCollectiveAllReduce,
    ],
)
def test_private_names_are_not_tensorflow_s(ours):
    """But for those that _compat/ replaces on purpose."""
    own = {
        name
        for one in ours.mro()
        if one.__module__.startswith("tf_optimizers.distribute")
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
