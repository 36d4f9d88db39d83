"""The functions that docs/architecture.md names exist, and run in its order."""

import ast
import pathlib
import re
import sys
import threading

import flow_lines
import keras
import pytest
import tensorflow as tf
from flow_lines import LINK, code_lines

import tf_optimizers as tfo
from tf_optimizers.workers.steps import replica_state

ROOT = pathlib.Path(tfo.__file__).parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text()

# The largest number of lines of code in a file, without comments and
# docstrings: as much as a reader can keep in mind. A limit on all lines would
# lead to split classes and short docstrings.
LONGEST = 300

# The optimizer of a flow, and the largest number of lines to read.
FLOWS = {
    "Lamb": (lambda: tfo.Lamb(0.1), 706),
    "DGCMomentum": (lambda: tfo.DGCMomentum(0.1, min_compress_size=1), 1990),
    "SparseLoCo": (
        lambda: tfo.SparseLoCo(keras.optimizers.SGD(), min_compress_size=1),
        2239,
    ),
    "AdamOffload": (lambda: tfo.AdamOffload(0.1), 741),
    "ShardedState": (lambda: tfo.ShardedState(keras.optimizers.Adam()), 1137),
}


def definitions(path):
    """Return the first line of every class and function, by name."""
    found = {}

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            inside = prefix
            if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
                inside = f"{prefix}{child.name}."
                first = [*child.decorator_list, child][0]
                found[inside[:-1]] = first.lineno
            visit(child, inside)

    visit(ast.parse((ROOT / path).read_text()), "")
    return found


def calls_of_a_step(make, strategy):
    """Return (file, first line) of the functions called, in order."""
    with strategy.scope():
        # No other test compiles a kernel for this shape.
        weight = keras.Variable(tf.ones([7, 11, 13]))
        optimizer = make()
        optimizer.build([weight])

    @tf.function(autograph=False)
    def step():
        gradient = tf.ones(weight.shape)
        strategy.run(lambda: optimizer.apply([gradient], [weight]))

    seen = {}

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and "tf_optimizers" in code.co_filename:
            seen.setdefault((code.co_filename, code.co_firstlineno), None)

    sys.setprofile(note)
    threading.setprofile(note)
    try:
        step.get_concrete_function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(seen)


def test_code_is_counted_without_comments():
    text = '''"""A module."""

import os  # a comment

# Another.
def f(
    x,
):
    """Return

    a line.
    """
    return """two
lines"""
'''
    assert code_lines(text) == {3, 6, 7, 8, 13, 14}


def test_no_file_has_more_code_than_a_reader_can_hold():
    paths = sorted((ROOT / "tf_optimizers").rglob("*.py"))
    assert len(paths) > 100
    counts = {
        str(path.relative_to(ROOT)): len(code_lines(path.read_text()))
        for path in paths
    }
    assert {p: n for p, n in counts.items() if n > LONGEST} == {}


def test_no_two_files_have_one_name():
    """Without its folder, a name in a traceback or a search says which file."""
    names = [
        path.name
        for path in (ROOT / "tf_optimizers").rglob("*.py")
        if path.stem not in ("__init__", "__main__")
        and path.parent.name != "_compat"
    ]
    assert {name for name in names if names.count(name) > 1} == set()


@pytest.mark.parametrize("name, path", sorted(set(LINK.findall(TEXT))))
def test_names_on_the_page_exist(path, name):
    assert name in definitions(path)


def test_table_of_replicas_names_the_users_of_fields():
    folder = ROOT / "tf_optimizers" / "workers"
    row = re.compile(r"^    (\w+) {2,}(.+?) {2,}(.+)$", re.M)
    table = row.findall(replica_state.__doc__)
    named = {
        field: {*setting.split(", "), *reading.split(", ")}
        for field, setting, reading in table[1:]
    }
    used = {field: set() for field in dir(replica_state.replica)}
    for path in folder.rglob("*.py"):
        text = path.read_text()
        fields = re.findall(r"\breplica\.(\w+)", text)
        for given in re.findall(r"\breplica\.set\((.*?)\):", text, re.S):
            fields += re.findall(r"(\w+)=", given)
        for field in fields:
            used[field].add(path.stem)
    fields = replica_state.replica.__annotations__
    assert named == {field: used[field] for field in fields}


def test_no_flow_has_become_longer_to_read():
    assert set(flow_lines.flows(ROOT)) == set(FLOWS)
    counts = {
        name: sum(flow_lines.count(ROOT, name).values()) for name in FLOWS
    }
    assert all(count > 300 for count in counts.values())
    longer = {n: c for n, c in counts.items() if c > FLOWS[n][1]}
    assert longer == {}, "See `python tools/flow_lines.py`."


def test_lines_to_read_are_found(tmp_path):
    files = {
        "docs/architecture.md": """
### `Own`

1. [`Base.apply`](../tf_optimizers/base.py)

[`unused`](../tf_optimizers/base.py)

## Words
""",
        "tf_optimizers/own.py": """
from tf_optimizers.base import Base

class Own(Base):
    def _step(self):
        super()._step()
        self._other.send(unused)
        self._other.receive()
""",
        "tf_optimizers/base.py": """
from tf_optimizers.checks import check
from tf_optimizers.sent import Sent

LIMIT = 3  # Read.
OTHER = 4

class Base:
    def apply(self):
        'Step.'
        check(LIMIT)

        self._step()

    def _step(self):
        self._sent.send()

def unused():
    pass
""",
        "tf_optimizers/sent.py": """
class Sent:
    def send(self):
        pass

    def receive(self):
        pass
""",
        "tf_optimizers/checks.py": """
def check(value):
    _raise(value)

def _raise(value):
    pass
""",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    assert flow_lines.count(tmp_path, "Own") == {
        "tf_optimizers/own.py": 4,
        "tf_optimizers/base.py": 6,
        "tf_optimizers/sent.py": 4,
        "tf_optimizers/checks.py": 2,
    }


@pytest.mark.parametrize("optimizer", FLOWS)
def test_flow_is_what_a_step_runs(optimizer, request):
    if optimizer in ("DGCMomentum", "SparseLoCo", "ShardedState"):
        strategy = tfo.SparseMultiWorkerMirroredStrategy()
        assert strategy.num_replicas_in_sync == 2
    else:
        strategy = tf.distribute.get_strategy()
    called = calls_of_a_step(FLOWS[optimizer][0], strategy)
    listed = [
        (str(ROOT / path), definitions(path)[name])
        for path, name in flow_lines.flows(ROOT)[optimizer]
    ]
    missing = [place for place in listed if place not in called]
    assert not missing
    order = [called.index(place) for place in listed]
    assert order == sorted(order)
