"""Turns rows of text into tables for the terminal and for Markdown."""

from rich.table import Table


def terminal_table(title: str, rows: list[list[str]]) -> Table:
    """Return a table for the terminal; the first row is the heading."""
    shown = Table(title=title)
    first, *others = rows[0]
    shown.add_column(first, no_wrap=True)  # Names are never cut.
    for heading in others:
        shown.add_column(heading, justify="right")
    for row in rows[1:]:
        shown.add_row(*row)
    return shown


def markdown_table(rows: list[list[str]]) -> str:
    """Return a Markdown table; the first row is the heading."""
    rule = ["---", *("---:" for _ in rows[0][1:])]
    return "\n".join(
        f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]]
    )
