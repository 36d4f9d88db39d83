"""Counts habits that make English hard to read, in docs and in the package.

    python tools/prose_habits.py [--list HABIT]

Prints a table with a row for each habit, and with columns for docs, docstrings,
comments and strings. With `--list`, also prints every place of one habit. A
count need not be 0: for example, "what" may begin a question.
"""

import argparse
import ast
import io
import pathlib
import re
import tokenize
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
HABITS = {
    "what": r"\bwhat\b",
    "begins with Of": r"(?:^|[.:;|]\s+)Of\b",
    "likewise, as above": r"\b[Ll]ikewise\b|\bAs above\.|\bOf these\.",
    "tell, say, refuse": (
        r"\bTells? whether\b|\b[Rr]efuse[sd]?\b|(?:^|\. )Say\b"
    ),
    "who, nobody, one that": r"\b(?i:who|whoever|nobody|one that)\b",
    "alike": r"\balike\b",
    "beside": r"\b[Bb]esides?\b",
    "for good": r"\bfor good\b",
    "so many": r"\b[Ss]o many\b",
    "share out, hold back": (
        r"\b(?i:shar(?:e|es|ed|ing)(?: \w+)? out|(?:held|holds?) back)\b"
    ),
    "told": r"\b[Tt]old\b",
    "anew": r"\banew\b",
    "room, house": r"\b(?:room|house)\b",
    "out of date": r"\bout of date\b",
    "of which, at whose": r"\b(?:of|in|at|for|by) (?:which \w+|whose)\b",
    "inversion": (
        r"(?:^|[.;:] )(?:So|Nor|Nowhere|Neither) "
        r"(?:do|does|did|is|are|was|has|have|can|must|would)\b"
    ),
    "weigh, on purpose": r"\b[Ww]eigh(?:s|ed|ing)?\b|\bon purpose\b",
    "also before a phrase": (
        r", also (?:at|by|for|from|if|in|of|on|under|when|with|without)\b"
    ),
    "of its own, of ours": (
        r"\b[Oo]f (?:(?:its|their|one's|our|your) own|ours|theirs|yours)\b"
    ),
}
# Code, comments and targets of links, which are not English.
CODE = re.compile(
    r"^```.*?^```|^ {4}.*?$|``.+?``|`[^`]+`|<!--.*?-->|(?<=\])\([^()]*\)",
    re.M | re.S,
)
# Tables that benchmarks/tables.py writes.
MEASURED = re.compile(
    r"<!-- \w+(?:: .+?)? -->\n(?:\n[^\n|<#]+\n)?\n(?:\|.*\n)+"
)


def prose(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) for every piece of English in a file."""
    text = path.read_text()
    if path.suffix == ".md":
        yield "docs", CODE.sub("`", MEASURED.sub("", text))
        return
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = set()
    for node in nodes:
        if isinstance(
            node,
            (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
        ) and (docstring := ast.get_docstring(node)):
            docstrings.add(node.body[0].value)  # type: ignore[attr-defined]
            yield "docstrings", re.sub(r"`[^`]+`", "`", docstring)
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in docstrings and " " in node.value:
                yield "strings", re.sub(r"`[^`]+`", "`", node.value)
    comments = [
        (token.start[0], token.string.lstrip("# "))
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    block, last = "", -1
    for line, comment in comments:
        if line != last + 1 and block:
            yield "comments", block
            block = ""
        block, last = f"{block} {comment}".strip(), line
    if block:
        yield "comments", block


def files(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the pages and modules that people read."""
    yield from sorted(root.glob("docs/*.md"))
    yield from sorted(root.glob("[A-Z]*.md"))
    yield from sorted(root.glob("tf_optimizers/**/*.py"))


def places(
    paths: Iterable[pathlib.Path],
) -> Iterator[tuple[str, str, pathlib.Path, str]]:
    """Yield (habit, kind, file, words around it) for every match."""
    for path in paths:
        for kind, text in prose(path):
            # Join the lines: a match may continue on the next line.
            for paragraph in re.split(r"\n(?=\s*\n|\s*[-|#*])", text):
                joined = " ".join(paragraph.split()).lstrip("-|#* ")
                for habit, pattern in HABITS.items():
                    for match in re.finditer(pattern, joined):
                        around = slice(
                            max(match.start() - 40, 0), match.end() + 40
                        )
                        yield habit, kind, path, joined[around]


def main() -> None:
    """Print the table, and the places of one habit if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", nargs="?", type=pathlib.Path, default=ROOT)
    parser.add_argument("--list", choices=HABITS, help="print every place")
    options = parser.parse_args()
    found = list(places(files(options.root)))
    kinds = ("docs", "docstrings", "comments", "strings")
    print(f"{'':24}" + "".join(f"{kind:>12}" for kind in kinds))
    for habit in HABITS:
        counts = [
            sum(row[:2] == (habit, kind) for row in found) for kind in kinds
        ]
        print(f"{habit:24}" + "".join(f"{count:12}" for count in counts))
    for habit, _, path, words in found:
        if habit == options.list:
            print(f"{path.relative_to(options.root)}: ...{words}...")


if __name__ == "__main__":
    main()
