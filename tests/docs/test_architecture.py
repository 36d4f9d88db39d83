"""The functions that docs/architecture.md names exist, and run in its order."""

import ast
import io
import pathlib
import re
import sys
import threading
import tokenize

import keras
import pytest
import tensorflow as tf

import tf_optimizers as tfo

ROOT = pathlib.Path(tfo.__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./(tf_optimizers/[\w/]+\.py)\)")

# The most lines of code in a file, without comments and docstrings: what a
# reader can keep in mind. A limit on all lines would cut classes in pieces, and
# what is said about them.
LONGEST = 300

# The most files that a reader should need to follow a gradient.
FLOWS = {
    "Lamb": (lambda: tfo.Lamb(0.1), 7),
    "DGCMomentum": (lambda: tfo.DGCMomentum(0.1, min_compress_size=1), 10),
    "AdamOffload": (lambda: tfo.AdamOffload(0.1), 6),
}


def links(text):
    return [(path, name) for name, path in LINK.findall(text)]


def steps(optimizer):
    """Return the numbered functions of the flow of an optimizer."""
    (section,) = re.findall(
        rf"^### `{optimizer}`.*?(?=^##)", PAGE.read_text(), re.M | re.S
    )
    return [
        link
        for line in section.splitlines()
        if re.match(r"\d+\. ", line)
        for link in links(line)
    ]


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


def code_lines(text):
    """Return the numbers of the lines that are neither blank nor said."""
    code, said = set(), {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE}
    said |= {tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in said:
            code.update(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node):
            first = node.body[0]
            code.difference_update(range(first.lineno, first.end_lineno + 1))
    return code


def calls_of_a_step(make, strategy):
    """Return (file, first line) of the functions called, in order."""
    with strategy.scope():
        # A shape that no other test compiles a kernel for.
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


def test_code_is_counted_without_what_is_said_about_it():
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


@pytest.mark.parametrize("path, name", sorted(set(links(PAGE.read_text()))))
def test_what_the_page_names_exists(path, name):
    assert name in definitions(path)


@pytest.mark.parametrize("optimizer", FLOWS)
def test_flow_is_followed_through_few_files(optimizer):
    limit = FLOWS[optimizer][1]
    assert 5 < len({path for path, _ in steps(optimizer)}) <= limit


@pytest.mark.parametrize("optimizer", FLOWS)
def test_flow_is_what_a_step_runs(optimizer, request):
    if optimizer == "DGCMomentum":
        strategy = tfo.SparseMultiWorkerMirroredStrategy()
        assert strategy.num_replicas_in_sync == 2
    else:
        strategy = tf.distribute.get_strategy()
    called = calls_of_a_step(FLOWS[optimizer][0], strategy)
    listed = [
        (str(ROOT / path), definitions(path)[name])
        for path, name in steps(optimizer)
    ]
    missing = [place for place in listed if place not in called]
    assert not missing
    order = [called.index(place) for place in listed]
    assert order == sorted(order)
