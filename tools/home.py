"""Writes the repository's address wherever it is said.

    python tools/home.py                        # do all places agree?
    python tools/home.py OWNER/NAME             # set the address
    python tools/home.py --published            # the package is on PyPI
    python tools/home.py --no-published         # it is not
    python tools/home.py --pin v0.2.0           # for the index; see below

`[home]` in setup.cfg is the one place to look it up. Everything else follows:
links in pages, notebooks and settings, the install cell of each notebook, and
each `pip install` below an `<!-- install -->` comment.

PyPI shows README.md, but has no other file of the repository. `--pin` makes the
README's links absolute, to one tag; the release workflow does so before it
builds.
"""

import argparse
import configparser
import dataclasses
import functools
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PLACES = (
    "*.md",
    "CITATION.cff",
    "mkdocs.yml",
    "setup.cfg",
    ".github/**/*.md",
    ".github/**/*.yml",
    "colab/*.ipynb",
    "docs/**/*.md",
)
# Repositories that are not this one, and may be linked to.
OTHERS: frozenset[str] = frozenset()

REPOSITORY = re.compile(
    r"\b(github\.com/|colab\.research\.google\.com/github/)"
    r"([\w.-]+/[\w-]+(?:\.[\w-]+)*)"
)
SITE = re.compile(r"https://[\w-]+\.github\.io/[\w.-]+")
INSTALL = re.compile(r"(<!-- install -->\n```bash\n).*?\n(```)", re.S)
LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?:|#)([^)#\s]+)")

UNKNOWN = "OWNER_UNKNOWN"  # Holds the owner's place until there is one.
INSTALL_CELL = """\
from importlib.util import find_spec
from pathlib import Path

# Install what is missing: from the clone around this notebook, if there is one,
# or else from {name}.
needed = ("keras", "matplotlib", "tensorflow_datasets", "tf_optimizers")
if not all(map(find_spec, needed)):
    source = "{source}"
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "tf_optimizers/__init__.py").exists():
            source = f"@ {{folder.as_uri()}}"
            break
    %pip install -q "tf_optimizers[demo] {{source}}\""""


@dataclasses.dataclass(frozen=True)
class Home:
    """Where the repository is, and whether PyPI has the package."""

    repository: str
    published: bool

    @property
    def is_unknown(self) -> bool:
        """Whether the repository is still to be put somewhere."""
        return self.repository.startswith(f"{UNKNOWN}/")

    @property
    def url(self) -> str:
        """The address of the repository."""
        return f"https://github.com/{self.repository}"

    @property
    def site(self) -> str:
        """The address of the documentation."""
        owner, name = self.repository.split("/")
        return f"https://{owner.lower()}.github.io/{name}"

    @property
    def source(self) -> str:
        """What follows the package's name in a requirement."""
        return "" if self.published else f"@ git+{self.url}"

    @property
    def install(self) -> str:
        """The command that installs the package."""
        if self.is_unknown and not self.published:
            return "pip install .  # in a clone: it is not on PyPI yet"
        requirement = f"tf_optimizers {self.source}".strip()
        return f'pip install "{requirement}"'

    @property
    def install_cell(self) -> str:
        """The cell that installs the package in a notebook."""
        unpublished = "the repository (the package is not on PyPI yet)"
        name = "PyPI" if self.published else unpublished
        return INSTALL_CELL.format(name=name, source=self.source)


def read() -> Home:
    """Return what setup.cfg says."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    section = config["home"]
    return Home(section["repository"], section.getboolean("published"))


def save(home: Home) -> None:
    """Write it into setup.cfg."""
    path = ROOT / "setup.cfg"
    text = path.read_text()
    for key, value in (
        ("repository", home.repository),
        ("published", str(home.published).lower()),
    ):
        text = re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
    path.write_text(text)


def places() -> list[pathlib.Path]:
    """Return the files in which the address may stand."""
    return sorted(path for place in PLACES for path in ROOT.glob(place))


def settled(path: pathlib.Path, home: Home) -> str:
    """Return what a file should hold."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = with_install_cell(text, home)
    text = REPOSITORY.sub(functools.partial(_with_address, home), text)
    text = SITE.sub(home.site, text)
    return INSTALL.sub(rf"\g<1>{home.install}\n\g<2>", text)


def _with_address(home: Home, match: re.Match[str]) -> str:
    host, repository = match.groups()
    if repository in OTHERS:
        return match[0]
    return f"{host}{home.repository}"


def with_install_cell(text: str, home: Home) -> str:
    """Return a notebook with the cell that installs the package."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if "install" in cell["metadata"].get("tags", ()):
            cell["source"] = home.install_cell.splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def absolute_links(
    text: str, folder: pathlib.Path, home: Home, version: str
) -> str:
    """Return a page whose relative links lead to the repository.

    Args:
        text: Markdown.
        folder: The one that its links start from.
        home: The repository.
        version: A branch or tag of it.
    """

    def absolute(match: re.Match[str]) -> str:
        opening, target = match.groups()
        path = (folder / target).resolve()
        kind = "tree" if path.is_dir() else "blob"
        kind = "raw" if opening.startswith("!") else kind
        place = path.relative_to(ROOT).as_posix()
        return f"{opening}{home.url}/{kind}/{version}/{place}"

    return LINK.sub(absolute, text)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repository", nargs="?", help="OWNER/NAME")
    parser.add_argument("--published", action=argparse.BooleanOptionalAction)
    parser.add_argument("--pin", metavar="TAG")
    options = parser.parse_args()
    home = read()
    if options.pin:
        check_is_known(home)
        readme = ROOT / "README.md"
        pinned = absolute_links(readme.read_text(), ROOT, home, options.pin)
        readme.write_text(pinned)
    elif options.repository or options.published is not None:
        move(home, options.repository, options.published)
    else:
        check(home)


def move(home: Home, repository: str | None, published: bool | None) -> None:
    """Set a new address, in all places."""
    repository = repository or home.repository
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        sys.exit(f"The address must be OWNER/NAME. Received: {repository}.")
    home = Home(repository, home.published if published is None else published)
    save(home)
    for path in places():
        path.write_text(settled(path, home))


def check(home: Home) -> None:
    """Name the places that say something else, and fail if there are any."""
    others = [p for p in places() if p.read_text() != settled(p, home)]
    for path in others:
        sys.stderr.write(f"{path.relative_to(ROOT)} has another address\n")
    if others:
        sys.exit(f"Run `python tools/home.py {home.repository}`.")


def check_is_known(home: Home) -> None:
    """Fail if the address has never been set."""
    if home.is_unknown:
        sys.exit(
            "The address must be set before a release. Received: "
            f"{home.repository}. Run `python tools/home.py OWNER/NAME`."
        )


if __name__ == "__main__":
    main()
