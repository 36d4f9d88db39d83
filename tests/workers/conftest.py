"""The strategy that most tests of this folder run under."""

import pytest
import tensorflow as tf


@pytest.fixture(scope="module")
def ours():
    """Return our strategy, with two replicas in this process."""
    # Imported after `tests/conftest.py` has chosen devices.
    import tf_optimizers as tfo

    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 2
    return strategy


@pytest.fixture
def optimized_graphs():
    """Let TensorFlow optimize graphs, which short tests turn off."""
    options = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": False}
    )
    yield
    tf.config.optimizer.set_experimental_options(options)


@pytest.fixture
def of_one_replica(monkeypatch):
    """Return our strategy, with one replica in this process."""
    import tf_optimizers as tfo

    first, *_ = tf.config.list_logical_devices("CPU")
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda _: [first])
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 1
    return strategy
