"""Checks the site that MkDocs has built, as a visitor sees it.

    mkdocs build && python tools/check_site.py site

MkDocs checks the links of pages. This tool checks the HTML: links, images and
anchors, linked files of the repository, titles without text below them, and
text that should have become a list, a table, a title or code.
"""

import dataclasses
import pathlib
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag

import home

# Markup that Markdown has left as text, or a label such as "Memory: " at the
# beginning of a line, if docstring_markdown.py does not know the label.
LEFTOVER = re.compile(
    r":::|```|\*\*|\]\(|>>> |^\s*[-*|] |\.\n[A-Z]\w+( [a-z]+){0,2}: ", re.M
)
CODE = ("code", "pre", "script", "style", "svg")
TITLES = ("h1", "h2", "h3", "h4", "h5", "h6")
# No page has a quotation, so a quotation is a misread example of a docstring.
UNWANTED = ("blockquote",)
VOID = ("br", "hr", "img", "input", "link", "meta")


@dataclasses.dataclass
class Page(HTMLParser):
    """The links, anchors and paragraphs of a page."""

    path: pathlib.Path

    def __post_init__(self) -> None:
        """Read the page."""
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.prose: list[str] = []
        self.unwanted: list[str] = []
        self.titles: list[tuple[int, str, bool]] = []
        self._open: list[str] = []
        self.feed(self.path.read_text())

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        """Record links, anchors and titles."""
        values = {name: value or "" for name, value in attrs}
        self.links += [
            values[name] for name in ("href", "src") if values.get(name)
        ]
        self.ids |= {values["id"]} if "id" in values else set()
        if tag in VOID:
            return
        self._open.append(tag)
        if "article" not in self._open:
            return
        if tag in UNWANTED or "admonition" in values.get("class", ""):
            self.unwanted.append(tag)
        elif tag in TITLES:
            self.titles.append((int(tag[1]), "", False))
        elif tag == "p":
            self.prose.append("")

    def handle_endtag(self, tag: str) -> None:
        """Leave the element."""
        while tag in self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        """Add text to the current title or paragraph."""
        is_code = any(tag in CODE for tag in self._open)
        if "article" not in self._open or not data.strip():
            return
        if any(tag in TITLES for tag in self._open):
            level, text, _ = self.titles[-1]
            self.titles[-1] = level, text + data, False
            return
        if self.titles:
            self.titles[-1] = *self.titles[-1][:2], True
        if "p" in self._open and not is_code:
            self.prose[-1] += data

    def empty_titles(self) -> Iterator[str]:
        """Yield titles without text or a subtitle below them."""
        nexts = [level for level, _, _ in self.titles[1:]] + [0]
        for (level, text, has_text), after in zip(
            self.titles, nexts, strict=True
        ):
            if not has_text and after <= level:
                yield text


def problems(site: pathlib.Path) -> Iterator[str]:
    """Yield problems, page by page."""
    if not (site / "index.html").exists():
        yield "index.html is missing"
    paths = [p for p in sorted(site.rglob("*.html")) if p.name != "404.html"]
    pages = {path: Page(path) for path in paths}
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in page.links:
            if not leads_somewhere(link, path, pages):
                yield f"{name}: {link} leads nowhere"
        for text in page.prose:
            if found := LEFTOVER.search(text):
                yield f"{name}: {found[0]!r} in {text[:60]!r}"
        for tag in page.unwanted:
            yield f"{name}: a <{tag}> that no page contains"
        for title in page.empty_titles():
            yield f"{name}: nothing under {title!r}"


def leads_somewhere(
    link: str, path: pathlib.Path, pages: dict[pathlib.Path, Page]
) -> bool:
    """Return whether a link has a target; True for links to other sites."""
    if home.UNKNOWN in link:
        return False
    target, anchor = urldefrag(unquote(link))
    url = re.escape(home.url())
    if ours := re.fullmatch(rf"{url}/(?:blob|tree|raw|edit)/main/(.+)", target):
        return (home.ROOT / ours[1]).exists()
    if re.match(r"\w+:|//", target):
        return True
    file = (path.parent / target).resolve() if target else path
    file = file / "index.html" if file.is_dir() else file
    if not anchor or file not in pages:
        return file.exists()
    return anchor in pages[file].ids


def main() -> None:
    """Print problems; fail if there are any."""
    site = pathlib.Path(sys.argv[1]).resolve()
    found = list(problems(site))
    for problem in found:
        sys.stderr.write(f"{problem}\n")
    if found:
        sys.exit(f"{len(found)} problems in {site}")


if __name__ == "__main__":
    main()
