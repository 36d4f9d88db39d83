"""All that says where the repository lives says the same."""

import configparser
import importlib.util
import pathlib
import re
import shutil
import sys

import home
import pytest

ADDRESS = home.read()
TEXTS = (".cfg", ".cff", ".ini", ".ipynb", ".md", ".py", ".toml", ".yml")


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A folder with all the places that say where the repository is."""
    for path in home.places():
        target = tmp_path / path.relative_to(home.ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for page in ("docs", "benchmarks"):
        (tmp_path / page).mkdir(exist_ok=True)
    monkeypatch.setattr(home, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def run(monkeypatch):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["home.py", *arguments])
        home.main()

    return run


@pytest.mark.parametrize(
    "path", home.places(), ids=lambda path: str(path.relative_to(home.ROOT))
)
def test_place_has_the_address_of_setup_cfg(path):
    assert path.read_text() == home.settled(path, ADDRESS)


def test_no_other_file_has_an_address():
    hidden = {"site", "build", "dist", "report", "tests"}
    for top in home.ROOT.iterdir():
        is_ours = not top.name.startswith(".") or top.name in (".github", ".ci")
        # Not even to look into tox's environments, which takes seconds.
        if not is_ours or top.name in hidden:
            continue
        for path in [top, *top.rglob("*")]:
            if path.suffix in TEXTS:
                for _, repository in home.REPOSITORY.findall(path.read_text()):
                    assert repository == ADDRESS.repository, path


def test_address_is_set_everywhere(copy, run):
    run("some-body/optimizers.tf")
    assert home.read() == home.Home("some-body/optimizers.tf", False)
    for path in home.places():
        text = path.read_text()
        assert ADDRESS.repository not in text
        assert ADDRESS.site not in text
    readme = (copy / "docs" / "index.md").read_text()
    assert "git+https://github.com/some-body/optimizers.tf" in readme
    config = (copy / "mkdocs.yml").read_text()
    assert "https://some-body.github.io/optimizers.tf/" in config
    run()


def test_published_package_is_installed_by_name(copy, run):
    run("--published")
    assert home.read() == home.Home(ADDRESS.repository, True)
    text = (copy / "docs" / "index.md").read_text()
    assert '```bash\npip install "tf_optimizers"\n```' in text
    for path in (copy / "colab").glob("*.ipynb"):
        assert "git+" not in path.read_text()
    run()
    run("--no-published")
    assert home.read() == ADDRESS


def test_install_of_an_unknown_owner_is_that_of_a_clone(copy, run):
    run(f"{home.UNKNOWN}/tf_optimizers")
    assert "```bash\npip install .  # in a clone" in (
        (copy / "README.md").read_text()
    )


def test_place_with_another_address_is_named(copy, run, capsys):
    page = copy / "docs" / "index.md"
    page.write_text(page.read_text() + "\nhttps://github.com/them/theirs\n")
    with pytest.raises(SystemExit, match="tools/home.py"):
        run()
    assert "docs/index.md has another" in capsys.readouterr().err


def test_address_without_owner_is_refused(copy, run):
    with pytest.raises(SystemExit, match="OWNER/NAME. Received: optimizers"):
        run("optimizers")


def test_pinned_readme_has_no_relative_link(copy, run):
    run("me/mine")
    run("--pin", "v0.2.0")
    text = (copy / "README.md").read_text()
    assert not home.LINK.search(text)
    url = "https://github.com/me/mine"
    assert f"]({url}/blob/v0.2.0/docs/lamb.md)" in text
    assert f"{url}/raw/v0.2.0/docs/benchmarks/" in text
    assert f"]({url}/tree/v0.2.0/colab)" in text


def test_nothing_is_released_before_the_address_is_set(copy, run):
    run(f"{home.UNKNOWN}/tf_optimizers")
    before = (copy / "README.md").read_text()
    with pytest.raises(SystemExit, match="set before a release"):
        run("--pin", "v0.2.0")
    assert (copy / "README.md").read_text() == before


@pytest.fixture
def installed(monkeypatch):
    """Run the cell that installs; return what it asks pip for."""

    def installed(address, folder, *, missing):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name: name not in missing or None,
        )
        code, count = re.subn(
            r'%pip install -q ("\S+ \{source\}")',
            r"asked.append(f\1)",
            address.install_cell,
        )
        assert count == 1
        asked = []
        exec(code, {"asked": asked})
        return asked

    return installed


def clone(folder):
    package = folder / "a clone" / "tf_optimizers"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    notebooks = package.parent / "colab"
    notebooks.mkdir()
    return notebooks


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("missing", ["tf_optimizers", "keras", "matplotlib"])
def test_notebook_installs_the_clone_it_lies_in(
    installed, tmp_path, published, missing
):
    address = home.Home("me/mine", published)
    notebooks = clone(tmp_path)
    for folder in (notebooks, notebooks.parent):
        (source,) = installed(address, folder, missing={missing})
        where = (tmp_path / "a clone").resolve().as_uri()
        assert source == f"tf_optimizers[demo] @ {where}"


def test_notebook_elsewhere_installs_from_the_repository(installed, tmp_path):
    (source,) = installed(
        home.Home("me/mine", False), tmp_path, missing={"tf_optimizers"}
    )
    assert source == "tf_optimizers[demo] @ git+https://github.com/me/mine"


def test_notebook_elsewhere_installs_what_is_published(installed, tmp_path):
    (source,) = installed(
        home.Home("me/mine", True), tmp_path, missing={"tf_optimizers"}
    )
    assert source.strip() == "tf_optimizers[demo]"


def test_notebook_installs_nothing_if_all_is_there(installed, tmp_path):
    assert installed(ADDRESS, clone(tmp_path), missing=()) == []


def test_metadata_has_the_addresses():
    config = configparser.ConfigParser(interpolation=None)
    config.read(home.ROOT / "setup.cfg")
    urls = dict(
        line.split(" = ")
        for line in config["metadata"]["project_urls"].strip().splitlines()
    )
    assert urls["Source"] == ADDRESS.url
    assert urls["Documentation"] == f"{ADDRESS.site}/"
    changelog = urls["Changelog"].removeprefix(f"{ADDRESS.url}/blob/main/")
    assert pathlib.Path(home.ROOT, changelog).exists()
