"""The strategy that most tests of this folder run under."""

import pytest


@pytest.fixture(scope="module")
def ours():
    """Return our strategy, with two replicas in this process."""
    # Imported after `tests/conftest.py` has chosen devices.
    import tf_optimizers as tfo

    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 2
    return strategy
