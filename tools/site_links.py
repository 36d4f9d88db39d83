"""A hook of MkDocs: links that leave docs/ lead to the repository.

Pages link to notebooks, benchmarks and other files by relative paths. These
work on the repository's host, but the site contains only docs/.
"""

import pathlib
import re
from typing import Any

import home

DOCS = home.ROOT / "docs"


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Return a page with absolute links to files outside of docs/."""
    folder = pathlib.Path(page.file.abs_src_path).parent

    def outside(match: re.Match[str]) -> str:
        path = (folder / match[2]).resolve()
        if path.is_relative_to(DOCS) or not path.exists():
            return match[0]  # MkDocs warns about broken links.
        return home.absolute_links(match[0], folder, "main")

    return home.LINK.sub(outside, markdown)
