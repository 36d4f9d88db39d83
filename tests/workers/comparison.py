"""TensorFlow's `MultiWorkerMirroredStrategy` and ours do the same.

Both live in each of two processes, and do all that scripts/two_strategies.py
has a table of. Not collected by `pytest` alone: `tox -e strategies`.
"""

import pytest
import real_workers
from scripts.two_strategies import BEHAVIOURS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each worker reports."""
    return real_workers.results(
        "two_strategies", tmp_path_factory.mktemp("strategies"), 2, timeout=280
    )


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_strategies_agree(results, name):
    """Values to the bit, and errors by their class."""
    behaviour = BEHAVIOURS[name]
    for result in results:
        stock, ours = result[name]["stock"], result[name]["ours"]
        assert stock.get("error") == behaviour.error, stock
        if behaviour.instead:
            assert behaviour.reason
            stock = result[name]["instead"]
            assert "value" in stock, stock
        assert ours.get("error") == stock.get("error"), ours
        assert ours.get("value") == stock.get("value")
