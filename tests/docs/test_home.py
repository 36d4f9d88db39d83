"""All files agree on the repository's address."""

import importlib.util
import json
import re
import shutil

import home
import pytest

REPOSITORY = home.url().removeprefix("https://github.com/")
OWNER, NAME = REPOSITORY.split("/")
TEXTS = (".cfg", ".cff", ".ini", ".ipynb", ".md", ".py", ".toml", ".yml")
ADDRESS = re.compile(
    r"(?:\bgithub\.com|google\.com/github)/([\w.-]+/[\w-]+(?:\.[\w-]+)*)"
)
NOTEBOOK = home.ROOT / "colab" / "quickstart.ipynb"


def test_all_files_have_the_address_of_setup_cfg():
    hidden = {"site", "build", "dist", "report", "tests"}
    for top in home.ROOT.iterdir():
        is_ours = not top.name.startswith(".") or top.name in (".github", ".ci")
        # Skips tox's environments, whose listing takes seconds.
        if not is_ours or top.name in hidden:
            continue
        for path in [top, *top.rglob("*")]:
            if path.suffix in TEXTS:
                text = path.read_text()
                assert {*ADDRESS.findall(text)} <= {REPOSITORY}, path
                sites = re.findall(r"([\w-]+)\.github\.io/([\w.-]+)", text)
                assert {*sites} <= {(OWNER.lower(), NAME)}, path


def test_readme_of_a_release_has_no_relative_link(tmp_path, monkeypatch):
    config = (home.ROOT / "setup.cfg").read_text()
    shutil.copy(home.ROOT / "README.md", tmp_path)
    for page in ("docs", "benchmarks", "colab"):
        (tmp_path / page).mkdir()
    monkeypatch.setattr(home, "ROOT", tmp_path)
    (tmp_path / "setup.cfg").write_text(config.replace(f"/{OWNER}/", "/me/"))
    home.main("v0.2.0")
    text = (tmp_path / "README.md").read_text()
    assert not home.LINK.search(text)
    url = f"https://github.com/me/{NAME}"
    assert f"]({url}/blob/v0.2.0/docs/lamb.md)" in text
    assert f"{url}/raw/v0.2.0/docs/demo/" in text
    assert f"]({url}/tree/v0.2.0/colab)" in text
    assert "```bash\npip install tf_optimizers\n```" in text
    (tmp_path / "setup.cfg").write_text(
        config.replace(f"/{OWNER}/", f"/{home.UNKNOWN}/")
    )
    with pytest.raises(SystemExit, match="release needs an address"):
        home.main("v0.2.0")
    assert (tmp_path / "README.md").read_text() == text


@pytest.mark.parametrize("missing", [None, "tf_optimizers", "matplotlib"])
@pytest.mark.parametrize("place", ["elsewhere", "a clone", "a clone/colab"])
def test_notebook_installs_its_clone_or_the_repository(
    place, missing, tmp_path, monkeypatch
):
    package = tmp_path / "a clone" / "tf_optimizers"
    for folder in (package, package.parent / "colab", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.chdir(tmp_path / place)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name != missing or None
    )
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = "".join(next(c for c in cells if c["cell_type"] == "code")["source"])
    pip = r'%pip install -q ("\S+ \{source\}")'
    code, count = re.subn(pip, r"asked.append(f\1)", code)
    assert count == 1
    asked = []
    exec(code, {"asked": asked})
    source = f"git+{home.url()}"
    if place != "elsewhere":
        source = package.parent.resolve().as_uri()
    assert asked == [f"tf_optimizers[demo] @ {source}"] * bool(missing)
