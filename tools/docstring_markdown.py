"""An extension of Griffe that turns our docstrings into Markdown.

Docstrings are written for `help()`: formulas are indented, and lines such as
"State:" or "Differs from Keras:" begin a new paragraph. Markdown and Griffe's
Google parser would turn formulas into quotes or sections, and would join such
lines to the preceding text. Sections of arguments lose only their "Defaults
to ...", which the signature shows.
"""

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import griffe

# Labels that may begin a line, before a colon.
LABELS = (
    "State",
    "Traffic",
    "Sparse gradients",
    "NaN and inf",
    "XLA",
    "Many replicas",
    "Differs from",
)
LABEL = re.compile(rf"^(?=(?:{'|'.join(LABELS)})\b)", re.M)
LABELLED = re.compile(rf"((?:{'|'.join(LABELS)})\b[^:]*):\s+(.*)", re.S)
# Sections that Griffe knows, and renders itself.
KNOWN = ("Args", "Attributes", "Raises", "Returns", "Yields", "Example")
# Sections of "name: text", which Griffe does not know.
LISTS = ("Options", "Exit codes")
SECTION = re.compile(rf"({'|'.join((*KNOWN, *LISTS, 'Reference'))}):$")
DEFAULT = re.compile(r"\s+Defaults\s+to\s+`[^`]*`\.$", re.M)
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")


class DocstringMarkdown(griffe.Extension):
    """Rewrites each docstring before Griffe parses it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """Return a docstring that Griffe's Google parser renders correctly."""
    return "\n\n".join(
        block
        for title, lines in sections(docstring.splitlines())
        for block in section(title, lines)
    )


def sections(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Split at lines such as "Args:"; a section ends where indentation ends."""
    title, content = "", []
    for line in lines:
        match = SECTION.fullmatch(line)
        if match or (title and line and not line.startswith(" ")):
            yield title, content
            title, content = (match[1], []) if match else ("", [line])
        else:
            content.append(line)
    yield title, content


def section(title: str, lines: list[str]) -> Iterator[str]:
    """Yield one section as blocks of Markdown."""
    text = "\n".join(lines).strip("\n")
    if title in LISTS:
        yield f"**{title}:**"
        yield "\n".join(items(textwrap.dedent(text)))
    elif title == "Reference":
        yield f"**Reference:** {linked(textwrap.dedent(text))}"
    elif title:
        # Griffe's name for this section is a plural.
        title = title.replace("Example", "Examples")
        yield f"{title}:\n{DEFAULT.sub('', text)}"
    else:
        yield from blocks(text)


def items(text: str) -> Iterator[str]:
    """Yield each "name: text" as an item of a list."""
    for item in re.split(r"\n(?! )", text):
        name, _, meaning = item.partition(": ")
        yield f"- `{name}`: " + " ".join(meaning.split())


def blocks(text: str) -> Iterator[str]:
    """Yield paragraphs, with labels in bold, and fenced formulas."""
    for lines in merged(re.split(r"\n\s*\n", text)):
        if lines.startswith(" "):
            yield fenced(textwrap.dedent(lines))
        else:
            for paragraph in LABEL.split(lines):
                if paragraph:
                    yield linked(LABELLED.sub(r"**\1:** \2", paragraph))


def merged(paragraphs: Iterable[str]) -> Iterator[str]:
    """Join indented blocks that only an empty line separates."""
    held = ""
    for paragraph in paragraphs:
        if held.startswith(" ") and paragraph.startswith(" "):
            held += f"\n\n{paragraph}"
            continue
        if held:
            yield held
        held = paragraph
    if held:
        yield held


def fenced(code: str) -> str:
    """Return a fenced block of code, marked as Python if it is."""
    try:
        ast.parse(code)
        language = "python"
    except SyntaxError:
        language = "text"
    return f"```{language}\n{code.rstrip()}\n```"


def linked(text: str) -> str:
    """Return text with links for arXiv numbers."""
    return ARXIV.sub(r"[\g<0>](https://arxiv.org/abs/\1)", text)
