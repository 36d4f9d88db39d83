"""The page of each optimizer agrees with its docstring and its signature."""

import inspect
import pathlib
import re
import textwrap

import numpy as np
import pytest
import tensorflow as tf
from cases import with_long

import tf_optimizers as tfo

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = {
    "lamb": tfo.Lamb,
    "lans": tfo.LANS,
    "adam_offload": tfo.AdamOffload,
    "dgc_momentum": tfo.DGCMomentum,
    "sharded_state": tfo.ShardedState,
    "sparse_loco": tfo.SparseLoCo,
}

each_page = pytest.mark.parametrize(
    ("page", "cls"), PAGES.items(), ids=PAGES.keys()
)


def read(page):
    return (DOCS / f"{page}.md").read_text()


@pytest.mark.parametrize(
    ("page", "cls"),
    [*PAGES.items(), ("schedules", tfo.schedules.LansSchedule)],
)
def test_formula_is_that_of_the_docstring(page, cls):
    formulas = re.findall(r"```text\n(.*?)```", read(page), re.S)
    assert formulas
    for formula in formulas:
        assert textwrap.indent(formula, "    ") in inspect.getdoc(cls)


@each_page
def test_page_has_required_parts(page, cls):
    text = read(page)
    assert text.startswith(f"# {cls.__name__}\n")
    for heading in ("Arguments", "When, and when not", "Differences"):
        assert f"\n## {heading}\n" in text
    papers = re.findall(r"arXiv:([\d.]+\d)", inspect.getdoc(cls))
    assert papers
    assert all(f"arxiv.org/abs/{paper}" in text for paper in papers)


@each_page
def test_code_of_the_page_runs(page, cls):
    (code,) = re.findall(r"```python\n(.*?)```", read(page), re.S)
    space = {}
    exec(code, space)
    assert isinstance(space["optimizer"], cls)


EXAMPLES = {
    path.stem: code
    for path in sorted(DOCS.glob("*.md"))
    for code in re.findall(r"```python\n(.*?)```", path.read_text(), re.S)
    if ".compile(" in code
}


# Other tests run the code of these pages, without a GPU.
LONG = ["callbacks", "horovod", "index", "strategy"]


@pytest.mark.parametrize("name", with_long(EXAMPLES, LONG))
def test_examples_train_on_a_machine_with_a_gpu(
    name, pretended_gpu, monkeypatch, tmp_path
):
    """There, the host is not the device for which XLA compiles."""
    code = EXAMPLES[name]
    if "import keras_hub" in code:
        pytest.importorskip("keras_hub")
    monkeypatch.chdir(tmp_path)
    gpus = tf.config.list_logical_devices("GPU")
    with tf.device("GPU:0" if gpus else "CPU:1"):
        exec(code, space := {})
        model = space["model"]
        if "model.fit(" not in code:
            model.fit(np.ones((8, 8)), np.ones((8, 1)), verbose=0)
    assert model.optimizer.iterations > 0


@pytest.mark.parametrize(
    "path", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem
)
def test_page_begins_with_its_purpose_and_something_to_run(path):
    """In its first screen: at most 16 lines are above the code."""
    start = "\n".join(path.read_text().splitlines()[:17])
    assert re.match(r"# .+\n\n[\w`\[]", start)
    before, *code = re.split(r"^```(?:python|bash)$", start, flags=re.M)
    assert code
    assert "\n## " not in before


@pytest.mark.parametrize(
    "path",
    sorted([*DOCS.glob("**/*.md"), *DOCS.parent.glob("*.md")]),
    ids=lambda path: path.stem,
)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize(
    "path", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem
)
def test_public_names_in_prose_exist(path):
    names = re.findall(r"\btfo((?:\.\w+)+)", path.read_text())
    for name in names:
        value = tfo
        for part in name.split(".")[1:]:
            value = getattr(value, part)
