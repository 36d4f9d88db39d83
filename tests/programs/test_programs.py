"""Random programs compute the same on several workers as in one process."""

import itertools

import pytest

from . import grammar, machine
from .__main__ import Run
from .machine import programs_of

pytestmark = pytest.mark.slow

# Listed here, since a seed gives another program after a change of the grammar.
HANDFUL = {
    "loop": {
        "where": "2",
        "script": "loop",
        "args": "nested",
        "layers": ["Dense"],
        "source": "tf.data",
        "rest": 1,
        "optimizer": "OfReversed",
        "wrapper": "ShardedState",
        "apply": "two losses",
        "actions": ["state"],
    },
    "step": {
        "where": "2",
        "layers": ["Centre"],
        "custom": "train_step",
        "step": "decorated",
        "returned": "by output",
        "rest": 3,
        "actions": ["predict"],
    },
    "average": {
        "where": "2",
        "layers": ["Dense"],
        "custom": "own average",
        "wrapper": "SparseLoCo of 4",
        "batches": 3,
    },
    "moving loss": {
        "where": "2",
        "layers": ["Dense"],
        "loss": "by hand: moving",
        "actions": ["evaluate", "fit"],
    },
    "held": {
        "where": "2",
        "layers": ["Unused"],
        "custom": "train_step",
        "drawn": "a number",
        "held by": "an object",
        "held as": "tf.Variable",
        "metrics": ["by hand: of losses"],
        "callbacks": ["Evaluating"],
    },
    "conservation": {
        "where": "2",
        "script": "conservation",
        "wire": "int4",
        "exchange": "sharded",
        "scales": "1e-8 to 1e8",
        "epochs": 1,
    },
}


def test_handful():
    programs = [(name, grammar.program_of(f)) for name, f in HANDFUL.items()]
    for _, program in programs:
        assert grammar.broken(program) is None
    check(programs)


@pytest.mark.long
def test_two_hundred():
    check(itertools.islice(programs_of(itertools.count()), 200))


def check(programs):
    run = Run(programs).all()
    assert not run.explanations, "\n\n".join(run.explanations)
    kinds = [outcome.kind for _, _, outcome in run.outcomes]
    assert kinds.count("skipped") <= len(kinds) / 10


def test_same_seed_makes_the_same_program():
    first, second = (
        list(itertools.islice(programs_of(itertools.count(7)), 20))
        for _ in range(2)
    )
    assert first == second


def test_features_that_no_program_has_are_refused(monkeypatch):
    monkeypatch.setattr(machine, "MOST_SEEDS", 100)
    with pytest.raises(ValueError, match=r"Received: .* only=\['SGD'\]"):
        next(programs_of(itertools.count(), only=["SGD"]))


def test_every_program_can_be_written_down_and_made_plain():
    for _, program in itertools.islice(programs_of(itertools.count()), 300):
        for ideal, nudge in ((False, 0), (True, 0), (True, 1)):
            text = grammar.script(program, ideal, nudge)
            compile(text, "script.py", "exec")
        plain = grammar.plain(program, grammar.unlike_plain(program))
        assert grammar.broken(plain) is None
