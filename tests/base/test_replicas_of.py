"""TensorFlow's strategies and ours give optimizers the same answers."""

import numpy as np
import pytest
import tensorflow as tf

import tf_optimizers as tfo
from tf_optimizers.codes.entries import Entries
from tf_optimizers.replicas import replicas_of


def ask(strategy):
    """Return the results on both replicas, as arrays."""

    @tf.function(autograph=False)
    def step():
        group = replicas_of()
        own = tf.constant([[1.0, 2.0], [10.0, 20.0]])[group.rank]
        position = tf.constant([[0], [3]])[group.rank]
        every, total = group.gather_and_sum(
            [Entries(own[:1], position, 4), own]
        )
        first, second = group.sum_at_owners([own, 2 * own], [1, 0])
        summed = [second, first][group.rank]  # At the owner of the value.
        first, second = group.gather_from_owners([own, 2 * own], [1, 0])
        return {
            "rank": tf.constant(group.rank),
            "count": tf.constant(group.count),
            "entries": tf.scatter_nd(every.indices[:, None], every.values, [4]),
            "total": total,
            "on the worker": group.sum_on_worker([own])[0],
            "at owners": summed,
            "of owners": tf.stack([first, second]),
        }

    with strategy.scope():
        results = strategy.run(step)
    local = strategy.experimental_local_results
    return {key: np.stack(local(results[key])).tolist() for key in results}


@pytest.fixture(params=["TensorFlow's", "ours"])
def strategy(request):
    if request.param == "ours":
        return tfo.SparseMultiWorkerMirroredStrategy()
    return request.getfixturevalue("mirrored")


def test_replicas_answer_the_same(strategy):
    assert ask(strategy) == {
        "rank": [0, 1],
        "count": [2, 2],
        "entries": [[1.0, 0.0, 0.0, 10.0]] * 2,
        "total": [[11.0, 22.0]] * 2,
        "on the worker": [[11.0, 22.0]] * 2,
        "at owners": [[22.0, 44.0], [11.0, 22.0]],
        "of owners": [[[10.0, 20.0], [2.0, 4.0]]] * 2,
    }
    group = replicas_of(strategy)
    assert (group.worker, group.workers, len(group.devices)) == (0, 1, 2)
    assert group.agree("a subject", [3]) == [[3]]
