"""Files for the hosting site agree with the rest of the repository."""

import configparser
import inspect
import pathlib
import re

import pytest
import yaml

import tf_optimizers as tfo

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())

each_workflow = pytest.mark.parametrize(
    "path", WORKFLOWS, ids=lambda path: path.stem
)


def ini(name):
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / name)
    return config


def jobs(path):
    return yaml.safe_load(path.read_text())["jobs"].values()


def steps(path):
    return [step for job in jobs(path) for step in job["steps"]]


def test_there_are_workflows_for_each_occasion():
    names = [path.stem for path in WORKFLOWS]
    assert names == ["ci", "docs", "nightly", "release"]


@each_workflow
def test_actions_are_pinned_by_major_version(path):
    for step in steps(path):
        if "uses" in step:
            assert re.search(r"@(release/)?v\d+$", step["uses"])


@each_workflow
def test_environments_of_tox_exist(path):
    environments = {
        name.removeprefix("testenv:") for name in ini("tox.ini").sections()
    }
    matrices = [
        row
        for job in jobs(path)
        for row in job.get("strategy", {}).get("matrix", {}).get("include", [])
    ]
    named = {row["environment"] for row in matrices}
    for step in steps(path):
        named |= set(re.findall(r"tox -e (\w+)", step.get("run", "")))
    assert named <= environments | {"py"}  # For the Python that runs tox.


@each_workflow
def test_scripts_exist(path):
    for step in steps(path):
        for script in re.findall(r"[\w.]+/\w+(?:\.py)?\b", step.get("run", "")):
            assert (ROOT / script).exists(), script


def test_ci_runs_on_every_supported_python():
    job, _ = jobs(ROOT / ".github" / "workflows" / "ci.yml")
    classifiers = ini("setup.cfg")["metadata"]["classifiers"]
    supported = re.findall(r"Python :: (3\.\d+)", classifiers)
    assert job["strategy"]["matrix"]["python"] == supported
    assert job["steps"][-1] == {"run": ".ci/run"}


def test_ci_runs_tests_that_the_readme_s_command_skips():
    """A separate job runs them, on one Python."""
    rest = "tox -e py -- -m long"
    _, job = jobs(ROOT / ".github" / "workflows" / "ci.yml")
    assert job["steps"][-1] == {"run": rest}
    assert f"| `{rest}` |" in (ROOT / "CONTRIBUTING.md").read_text()
    command = ini("tox.ini")["testenv"]["commands"]
    assert command.endswith(" {posargs}")


def test_site_is_built_with_the_packages_of_the_extra():
    extra = ini("setup.cfg")["options.extras_require"]["docs"].split()
    assert ini("tox.ini")["testenv:docs"]["deps"].split() == extra


def test_hooks_are_installed_for_commits_and_pushes():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    used = {
        stage
        for repository in config["repos"]
        for hook in repository["hooks"]
        for stage in hook.get("stages", ["pre-commit"])
    }
    assert set(config["default_install_hook_types"]) == used


def test_citation_is_of_the_latest_release():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## ([\d.]+) - (.+)$", changelog, re.M)
    cited = CITATION["version"], str(CITATION["date-released"])
    assert cited == releases[0]
    assert cited[0] == tfo.__version__


def test_citation_has_the_papers_of_the_optimizers():
    cited = {reference["url"] for reference in CITATION["references"]}
    for cls in (
        *(tfo.AdamOffload, tfo.DGCMomentum, tfo.Lamb, tfo.LANS),
        tfo.SparseLoCo,
    ):
        for number in re.findall(r"arXiv:([\d.]+\d)", inspect.getdoc(cls)):
            assert f"https://arxiv.org/abs/{number}" in cited
