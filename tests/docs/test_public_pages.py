"""Every public name has a page and a reference; the pages agree with it."""

import ast
import inspect
import pathlib
import re

import pytest
import yaml
from real_workers import output_of
from test_pages import PAGES as OPTIMIZERS

import tf_optimizers as tfo
from tf_optimizers import launch

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NAV = (ROOT / "mkdocs.yml").read_text()
PAGES = ("index", "strategy", "schedules", "callbacks", "bias_and_norm")
MODULES = ("callbacks", "schedules")
NAMES = [
    "launch",
    *(name for name in tfo.__all__ if name not in MODULES),
    *(f"callbacks.{name}" for name in tfo.callbacks.__all__),
    "schedules.LansSchedule",
]


def read(page):
    return (DOCS / f"{page}.md").read_text()


def below(page, heading):
    """Return the text between a heading and the next one."""
    text = re.split(rf"^#+ {heading}\n", read(page), maxsplit=1, flags=re.M)[1]
    return re.split(r"^#", text, maxsplit=1, flags=re.M)[0]


@pytest.mark.parametrize("name", NAMES)
def test_name_has_a_reference_and_a_guide(name):
    (reference,) = [
        path
        for path in (DOCS / "reference").glob("*.md")
        if re.search(rf"^::: tf_optimizers\.{name}$", path.read_text(), re.M)
    ]
    assert f"reference/{reference.name}" in NAV
    (guide,) = re.findall(r"\]\(\.\./(\w+\.md)\)", reference.read_text())
    text = (DOCS / guide).read_text()
    assert name.split(".")[-1] in text
    assert guide in NAV
    assert guide in read("index")


def test_dark_mode_inverts_every_image():
    rule = (
        r'\[data-md-color-scheme="slate"\] .* img\[src\$="(.*)"\] \{\s+filter:'
    )
    (ending,) = re.findall(rule, (DOCS / "site.css").read_text())
    images = [
        image
        for path in DOCS.glob("**/*.md")
        for image in re.findall(r"!\[[^]]+\]\((.*?)\)", path.read_text())
    ]
    assert len(images) > 20
    assert {pathlib.PurePath(image).suffix for image in images} == {ending}


def test_every_page_is_in_the_navigation():
    """`mkdocs build --strict` requires it."""
    pages = {
        str(path.relative_to(DOCS)) for path in sorted(DOCS.glob("**/*.md"))
    }
    nav = yaml.safe_load(NAV)["nav"]
    assert pages == set(leaves(nav))


def leaves(node):
    if isinstance(node, str):
        return [node]
    children = node.values() if isinstance(node, dict) else node
    return [leaf for child in children for leaf in leaves(child)]


@pytest.mark.parametrize(
    ("page", "heading", "cls"),
    [
        *((page, "Arguments", cls) for page, cls in OPTIMIZERS.items()),
        ("callbacks", "BackupAndRestore", tfo.callbacks.BackupAndRestore),
        ("callbacks", "The monitors", tfo.callbacks.CompressionMonitor),
        ("callbacks", "The monitors", tfo.callbacks.OffloadMonitor),
        ("callbacks", "The monitors", tfo.callbacks.ShardingMonitor),
        ("callbacks", "The monitors", tfo.callbacks.TrustRatioMonitor),
        ("schedules", "LansSchedule", tfo.schedules.LansSchedule),
        ("strategy", "Arguments", tfo.SparseMultiWorkerMirroredStrategy),
    ],
)
def test_arguments_are_those_of_the_signature(page, heading, cls):
    rows = re.findall(
        r"^\| `(\w+)` \|(?: `(.+?)`)? \|", below(page, heading), re.M
    )
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    assert [name for name, _ in rows] == list(parameters)
    for name, default in rows:
        if parameters[name].default is inspect.Parameter.empty:
            assert not default
        else:
            assert ast.literal_eval(default) == parameters[name].default


def test_options_are_those_of_the_launcher():
    options = launch.__doc__.split("Options:\n")[1].split("\n\n")[0]
    described = re.findall(r"^    (--[\w-]+)", options, re.M)
    rows = re.findall(
        r"^\| `(--[\w-]+)` \|(?: `(.+?)`)? \|", read("launch"), re.M
    )
    assert [name for name, _ in rows] == described
    for name, default in rows:
        entry = re.search(
            rf"^    {name} .*?(?=^    --|\Z)", options, re.M | re.S
        )[0]
        (stated,) = re.findall(r"Defaults\s+to `(.+?)`", entry) or [""]
        assert stated == default


def test_patterns_match_the_documented_paths():
    rows = re.findall(
        r"^\| `(\S+)` \| (yes|no) \|", read("bias_and_norm"), re.M
    )
    assert len(rows) == 8
    for path, matches in rows:
        found = any(re.search(p, path) for p in tfo.BIAS_AND_NORM)
        assert found is (matches == "yes"), path


def test_code_of_the_pages_runs(tmp_path):
    """All code runs in one process, in which the strategy must come first."""
    blocks = [
        (page, code)
        for page in sorted(PAGES, key=lambda page: page != "strategy")
        for code in re.findall(r"```python\n(.*?)```", read(page), re.S)
    ]
    assert {page for page, _ in blocks} == set(PAGES)
    script = "\n".join(f"exec({code!r}, {{}})" for _, code in blocks)
    output_of(script, cwd=tmp_path)
