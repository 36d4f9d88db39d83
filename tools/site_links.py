"""Hooks of MkDocs: links that leave docs/ lead to the repository.

Pages link to notebooks, benchmarks and other files by relative paths. These
work on the repository's host, but the site contains only docs/. Until the
repository has an address, a tooltip with the path replaces such a link.
"""

import pathlib
import re
from typing import Any

import home

DOCS = home.ROOT / "docs"
HAS_ADDRESS = home.UNKNOWN not in home.url()
LINK = re.compile(rf"{home.LINK.pattern}([^)]*\))")


def on_config(config: Any) -> Any:
    """Leave out the links of all pages that need an address."""
    if not HAS_ADDRESS:
        config.repo_url = config.edit_uri = config.site_url = None
    return config


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Return a page with absolute links to files outside of docs/."""
    folder = pathlib.Path(page.file.abs_src_path).parent

    def outside(match: re.Match[str]) -> str:
        path = (folder / match[2]).resolve()
        if path.is_relative_to(DOCS) or not path.exists():
            return match[0]  # MkDocs warns about broken links.
        if not HAS_ADDRESS:
            place = path.relative_to(home.ROOT).as_posix()
            return f'<abbr title="{place}">{match[1][1:-2]}</abbr>'
        return home.absolute_links(match[0], folder, "main")

    return LINK.sub(outside, markdown)
