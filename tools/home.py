"""Adapts README.md to PyPI, which shows only this page: `home.py v0.2.0`.

Relative links become absolute links to a tag of the repository, and the package
is installed by its name. The release workflow runs this before it builds.

`Source` in setup.cfg is the address of the repository.
"""

import configparser
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?:|#)([^)#\s]+)")
INSTALL = re.compile(r"(<!-- install -->\n```bash\n).*?\n(```)", re.S)
UNKNOWN = "OWNER_UNKNOWN"  # Until the repository has an owner.


def url() -> str:
    """Return the address of the repository."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    urls = config["metadata"]["project_urls"].strip().splitlines()
    return dict(line.split(" = ") for line in urls)["Source"]


def absolute_links(text: str, folder: pathlib.Path, version: str) -> str:
    """Return a page whose relative links lead to the repository.

    Args:
        text: Markdown.
        folder: The folder that links are relative to.
        version: A branch or tag.
    """

    def absolute(match: re.Match[str]) -> str:
        opening, target = match.groups()
        path = (folder / target).resolve()
        kind = "tree" if path.is_dir() else "blob"
        kind = "raw" if opening.startswith("!") else kind
        place = path.relative_to(ROOT).as_posix()
        return f"{opening}{url()}/{kind}/{version}/{place}"

    return LINK.sub(absolute, text)


def main(version: str) -> None:
    """Rewrite README.md for a release."""
    if UNKNOWN in url():
        sys.exit(
            f"A release needs an address. Received: {url()}. Replace {UNKNOWN} "
            "everywhere, as CONTRIBUTING.md says."
        )
    readme = ROOT / "README.md"
    text = INSTALL.sub(r"\1pip install tf_optimizers\n\2", readme.read_text())
    readme.write_text(absolute_links(text, ROOT, version))


if __name__ == "__main__":
    main(sys.argv[1])
