"""TensorFlow's `MultiWorkerMirroredStrategy` and ours do the same.

Both exist in each of two processes, and run the table of
scripts/two_strategies.py. `pytest` does not collect this file; `tox -e
strategies` does.
"""

import pytest
import real_workers
from scripts.two_strategies import BEHAVIOURS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the report of each worker."""
    return real_workers.results(
        *("two_strategies", tmp_path_factory.mktemp("strategies"), 2),
        timeout=280,
        optimized=True,
    )


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_strategies_agree(results, name):
    """Values are bitwise equal; errors have the same class."""
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
