"""A hook of MkDocs: links that leave docs/ lead to the repository.

The pages link to notebooks, benchmarks and files beside them. That works where
the repository is hosted; the site has only what is in docs/.
"""

import pathlib
import re
from typing import Any

import home

DOCS = home.ROOT / "docs"


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Return a page whose links to outside of docs/ are absolute."""
    folder = pathlib.Path(page.file.abs_src_path).parent

    def outside(match: re.Match[str]) -> str:
        path = (folder / match[2]).resolve()
        if path.is_relative_to(DOCS) or not path.exists():
            return match[0]  # MkDocs warns if there is none.
        return home.absolute_links(match[0], folder, "main")

    return home.LINK.sub(outside, markdown)
