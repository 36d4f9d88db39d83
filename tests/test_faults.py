"""A few of the faults of tests/faults, which tries all, and again."""

import json
import pathlib

import pytest
from faults import soak, table, training


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of a training that nothing happens to."""
    return training.reference(tmp_path_factory.mktemp("reference"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "step"),
    [
        ("bit of backup flipped", 31),
        ("NaN gradient on one worker", 47),
        ("network down for good", 58),
    ],
    ids=lambda value: str(value),
)
def test_fault_ends_as_it_should(case, step, expected):
    """Dead workers stand in test_resume.py."""
    if reason := soak.missing(case):
        pytest.skip(reason)
    trial = soak.attempt(case, step, expected)
    assert trial["passed"], trial


@pytest.mark.parametrize("figure", ["detected", "resumed", "steps_lost"])
def test_table_holds_medians_and_ranges(figure):
    trials = [
        {"case": "a", "passed": True, "weights_equal": True, figure: value}
        for value in (1.5, 4, 2)
    ]
    assert "| 2 (1.5-4) |" in table.make(trials)
    assert "| a | 3 | 3 |" in table.make(trials)


def test_table_in_docs_is_that_of_the_trials():
    root = pathlib.Path(__file__).parents[1]
    trials = json.loads((root / "tests/faults/results.json").read_text())
    text = (root / "docs" / "faults.md").read_text()
    assert f"<!-- faults -->\n\n{table.make(trials)}\n" in text
